#!/bin/sh
# vLLM's adaptive verification with its own estimator, with ours, and a fixed length, by concurrency, on a GPU:
#   sh benchmarks/vllm_gpu.sh TARGET '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 7}' [PRIORS.json]
# pip install "draftsmith[vllm]" first. Results as `vllm bench serve` writes them, in vllm-gpu/.
set -eu
target=$1 speculative=${2%\}} priors=${3:-1} port=8199
mkdir -p vllm-gpu
for who in fixed own ours; do
  adaptive=$([ "$who" = fixed ] && echo false || echo true)
  estimator=$([ "$who" = ours ] && echo "$priors" || echo 0)
  VLLM_USE_V2_MODEL_RUNNER=1 DRAFTSMITH_VLLM_ESTIMATOR=$estimator vllm serve "$target" --port $port --max-num-seqs 64 \
    --speculative-config "$speculative, \"draft_sample_method\": \"probabilistic\", \"enable_adaptive_verification\": $adaptive}" \
    > "vllm-gpu/$who.log" 2>&1 &
  server=$!
  trap 'kill $server' EXIT
  until curl -sf localhost:$port/health > /dev/null; do kill -0 $server; sleep 2; done
  for temperature in 0 1; do for concurrency in 1 4 16 64; do
    vllm bench serve --port $port --model "$target" --dataset-name hf --dataset-path philschmid/mt-bench \
      --num-prompts $((80 + 8 * concurrency)) --max-concurrency $concurrency --temperature $temperature --seed 0 \
      --save-result --result-filename "vllm-gpu/$who-$temperature-$concurrency.json"
  done; done
  kill $server
  wait $server || true
  trap - EXIT
done
