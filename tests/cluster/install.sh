#!/usr/bin/env bash
# SLURM and munge from Debian, where they are not installed yet. Nothing is configured and nothing stays running.
set -euo pipefail

missing=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null || missing+=(slurm-wlm)
command -v munged >/dev/null || missing+=(munge)
if ((${#missing[@]} == 0)); then
    exit 0
fi
sudo=()
if ((EUID != 0)); then sudo=(sudo); fi
# Packages may start their services; these daemons are of no use without a configuration.
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
