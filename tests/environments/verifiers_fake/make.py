"""A package ``verifiers`` that is as much of the real one as the player asks for, and a taskset for it. Its
agent is one request over urllib; what happens around it is named by the row.
"""

from pathlib import Path
from textwrap import dedent

_FILES = {
    "verifiers/__init__.py": '__version__ = "0.0.fake"',
    "verifiers/v1/__init__.py": "",
    "verifiers/v1/clients.py": """
        from dataclasses import dataclass
        @dataclass
        class EvalClientConfig:
            base_url: str
            api_key_var: str
        @dataclass
        class ModelContext:
            model: str
            client: EvalClientConfig
    """,
    "verifiers/v1/configs/__init__.py": "",
    "verifiers/v1/configs/agent.py": """
        class AgentConfig:
            harness = None
            model_fields_set = ()
    """,
    "verifiers/v1/harnesses/__init__.py": "",
    "verifiers/v1/harnesses/null.py": "class NullHarness: pass",
    "verifiers/v1/harnesses/utils/__init__.py": "",
    "verifiers/v1/harnesses/utils/launch.py": 'CHAT_PROGRAM_SOURCE = "DefaultAsyncHttpxClient = dict"',
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/utils/loaders.py": """
        import importlib, json
        from types import SimpleNamespace as Space
        from verifiers.v1.configs.agent import AgentConfig
        def import_taskset(name): return importlib.import_module(name)
        def default_harness_id(name): return "bash"
        def env_config_type(name, env): return Space(model_fields={"agent": Space(default=AgentConfig())})
        def resolve_env_config(data): return data
        def load_environment(config):
            assert config["agent"] == {"runtime": {"type": "subprocess"}, "harness": {"id": "outrider_chat"}}
            return import_taskset(config["taskset"]["id"]).Env(config)
    """,
    "fake_taskset.py": """
        import asyncio, json, os, sys, urllib.request
        from concurrent.futures import ThreadPoolExecutor
        from contextlib import asynccontextmanager
        from types import SimpleNamespace as Space

        POOL = ThreadPoolExecutor(64)

        class Rows(list):
            bounded = True
            def shuffle(self, seed): return Rows(reversed(self))

        def row(name):
            return Space(key="row " + name, data=Space(prompt_text=name))

        class Env:
            def __init__(self, config):
                self.taskset = Rows(row(one) for one in config["taskset"]["rows"])
            @asynccontextmanager
            async def serving(self):
                yield
            def slots(self, task): return [task]
            async def run_slot(self, task, ctx):
                what = task.data.prompt_text
                agent = Space(trainable=True, name="agent", config=Space(client=ctx.client))
                trace = Space(ok=True, errors=[], metrics={"num_words": 2.0, "none": None}, agent=agent)
                trace.rewards = {"right": Space(value=0.25), "more": Space(value=0.5), "none": None}
                trace.reward = 0.75
                episode = Space(ok=True, errors=[], traces=[trace])
                key = os.environ[ctx.client.api_key_var]
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(POOL, ask, ctx.client.base_url, key, what)
                if what == "hang":
                    await asyncio.sleep(3600)
                if what == "die":
                    sys.stderr.write("no memory\\n"); sys.stderr.flush()
                    os._exit(7)
                if what == "raise":
                    raise RuntimeError("of the machinery")
                if what == "nan":
                    trace.reward = float("nan")
                if what == "unscored":
                    trace.rewards = {}
                if what == "judge":
                    trace.agent.trainable = False
                if what == "two":
                    other = Space(**{**vars(trace), "reward": 0.25, "metrics": {}, "rewards": {}})
                    episode.traces.append(other)
                for kind in ("HarnessError", "TaskError"):
                    if what == kind:
                        episode.ok = trace.ok = False
                        trace.errors = [Space(type=kind, message="it broke\\nhere")]
                if what == "EnvError":
                    episode.ok = False
                    episode.errors = [Space(type=kind, message="run() broke")]
                return episode

        def ask(url, key, text):
            body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
            head = {"Authorization": "Bearer " + key}
            request = urllib.request.Request(url + "/chat/completions", body, head)
            with urllib.request.urlopen(request) as said:
                return json.load(said)
    """,
}


def write_fake(folder: Path) -> None:
    for name, text in _FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
