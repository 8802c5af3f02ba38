"""The recipe that ``outrider init`` writes."""

RECIPE = """\
# A starting recipe for Outrider.
#   outrider train THIS_FILE --dry-run           print the settings that apply, and who set each
#   outrider train THIS_FILE --run runs/first    train; continue with: outrider train --resume runs/first
#   outrider eval  THIS_FILE --run runs/base     evaluate the untrained model
# Any setting can be overridden on the command line: train.num_steps=20

seed = 0
num_threads = 2                 # of torch; leave a core to tools and simulators

[model]
name = "smollm2-135m-instruct"  # a packaged model, a Hugging Face id, or a folder
precision = "auto"              # bfloat16 where the matrix unit has it; master weights are float32
device = "cpu"                  # or "cuda"

[environment]
type = "factbook"               # | "tools" (your own data) | "scienceworld" (needs Java) \
| "webshop" | "textworld" | "house" | "alfworld"
hops = [2]                      # searches that a question needs
num_test = 200

# Your own questions instead, with search and Python. They have no expert: below, rapo then needs \
buffer.path, and
# the cold start demonstrations or num_examples = 0; docs/formats.md shows all these files.
# [environment]
# type = "tools"
# tools = ["search", "python"]
# corpus = "passages.jsonl"     # columns id, title, text
# train = { path = "train.jsonl" }
# test = { path = "test.jsonl" }

[algorithm]
type = "rapo"                   # "grpo" is the baseline without retrieval: delete num_hybrid for it
group_size = 8                  # rollouts a task
num_hybrid = 4                  # of them may retrieve off-policy steps

[rollout]
max_turns = 4
max_turn_tokens = 48
max_response_tokens = 512       # retrieved steps and observations count

[buffer]                        # rapo only
# path = "steps.sqlite"         # one made by: outrider buffer build THIS_FILE --out steps.sqlite
embedder = "minilm"             # "hash" needs no package
keep_best = 5                   # trajectories a task

[cold_start]                    # imitate experts first: a small model has to meet the format
num_examples = 128              # 0 switches it off
# demonstrations = "chats.jsonl" # trajectories of anybody, in place of the environment's experts
batch_size = 8
learning_rate = 1e-4

[train]
num_steps = 10
tasks_per_step = 8
checkpoint_every = 5

[optimizer]
learning_rate = 1e-5

[evaluation]
num_tasks = 200                 # held-out; before training, after the cold start and at the end
"""
