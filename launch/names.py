"""Names of options: as words of the command line, and as other projects call them."""

# Names in transformers, SpecForge, speculators, vLLM and other commands that mean what ours mean: they are accepted.
SAME = {
    "lr": "learning_rate",
    "epochs": "num_epochs num_train_epochs",
    "clip": "max_grad_norm grad_clip",
    "max_length": "max_seq_len max_seq_length seq_length max_model_len",
    "warmup_share": "warmup_ratio",
    "output": "output_dir save_path out",
    "target": "model model_name_or_path target_model target_model_path verifier",
    "head": "draft_model draft_model_path speculative_model",
    "data": "data_path train_data_path dataset",
    "ttt_steps": "ttt_length",
    "draft_vocab": "draft_vocab_size",
    "num_drafted": "num_speculative_tokens speculative_num_steps",
    "max_new_tokens": "max_tokens n_predict",
    "rows": "limit",
    "loggers": "report_to log_with",
}
# Names that are near to ours, and of settings that count differently here: the error says ours.
DIFFERENT = {
    "prompts responses answers artifact": "--data",
    "draft speculator": "--head, a head or a draft model",
    "engine lm_engine": "--loader, which runs a model here",
    "accelerator": "--device",
    "target_server feature_server": "--server",
    "per_device_train_batch_size train_batch_size": "--batch-size, of all devices and accumulated parts together",
    "gradient_accumulation_steps accumulation_steps": "--accumulate, which divides --batch-size",
    "num_speculative_tokens speculative_num_steps": "it in a method: --methods eagle3:k=5",
}


def dashed(name: str) -> str:
    return name.replace("_", "-")
