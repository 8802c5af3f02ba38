"""The HTTP client beside its hostile servers (test_endpoint_hostile.py): what is in a request's deadline and
what is not.
"""

import subprocess
import sys

_SCRIPT = """
import asyncio, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from outrider.engines import chat as http_client

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); \
self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *arguments): pass

server = HTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = http_client.HttpClient()
client.loop().run(asyncio.sleep(0))
before = set(sys.modules)
answer = client.request(f"http://127.0.0.1:{server.server_port}/", None, {}, timeout_s=60)
assert answer.content == b"ok"
print(*sorted(set(sys.modules) - before))
"""


def test_nothing_is_imported_within_the_deadline_of_the_first_request() -> None:
    """On a busy machine its imports took over a second, and a limit of one second saw a server that had not
    been asked.
    """
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not [name for name in found if name.partition(".")[0] in ("anyio", "h11", "httpcore2", "httpx2")]
