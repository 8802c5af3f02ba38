"""vLLM's side of ``speed.py``, run by the Python of an environment that has it: folder, precision, eager (0
or 1), further options as JSON.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1],
        dtype=sys.argv[2],
        enforce_eager=sys.argv[3] == "1",
        max_model_len=2048,
        enable_prefix_caching=True,
        **json.loads(sys.argv[4]),
    )
    for line in sys.stdin:
        question = json.loads(line)
        if "begin" in question:
            llm.reset_prefix_cache()
            answer: object = True
        else:
            new = question["new"]
            params = [
                SamplingParams(temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=1)
                # without seeds: vLLM 0.32 on a CPU ends when a seeded prompt is split
                for _ in question["contexts"]
            ]
            prompts = [{"prompt_token_ids": context} for context in question["contexts"]]
            answer = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
        print("ANSWER " + json.dumps(answer), flush=True)
