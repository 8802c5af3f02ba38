#!/bin/bash
# Begins a run, or goes on with it where it has begun: for schedulers that start a job again.
#     train_or_resume.sh RUN RECIPE [section.key=value ...]
set -euo pipefail

run=$1
shift
if [ -e "$run/config.toml" ]; then
    exec outrider train --resume "$run" --progress plain
fi
exec outrider train "$@" --run "$run" --progress plain
