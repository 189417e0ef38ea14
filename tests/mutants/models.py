"""Mutants of what is read of a model's files: settings, tensors, end tokens, and the comparison with transformers."""

from __future__ import annotations

from mutants.mutant import Mutant

LAYERS, GGUF, GGUF_SETTINGS = "modules/layers.py", "modules/pretrained/gguf.py", "modules/formats/gguf.py"
CHECKPOINT, PARITY = "modules/pretrained/checkpoint.py", "modules/pretrained/parity.py"
LOADING_TEST, GGUF_TEST = "tests/modules/pretrained/models_test.py", "tests/modules/pretrained/gguf_test.py"
SPELLINGS = f"{LOADING_TEST}::test_rotary_settings_in_every_spelling_are_those_of_transformers"
ROPE = f"{GGUF_TEST}::test_rotary_settings_are_read_as_llama_cpp_reads_them"
NAMED = f"{GGUF_TEST}::test_what_llama_cpp_computes_in_another_way_is_refused_by_name"

MUTANTS = [
    Mutant("rope-parameters-before-rope-scaling", LAYERS,
           'config_object(raw, "rope_scaling") or config_object(raw, "rope_parameters")',
           'config_object(raw, "rope_parameters") or config_object(raw, "rope_scaling")', (SPELLINGS,)),
    Mutant("rope-base-outside-first", LAYERS, "outside if inside is None else inside",
           "inside if outside is None else outside", (SPELLINGS,)),
    Mutant("lean-engine-of-any-logits", PARITY, "if share <= TOLERANCE:", "if True:",
           (f"{LOADING_TEST}::test_a_lean_engine_that_computes_something_else_is_not_used",)),
    Mutant("tied-whatever-the-files-hold", CHECKPOINT, "tie_embeddings=False) if differs", "tie_embeddings=True) if differs",
           (f"{LOADING_TEST}::test_an_output_embedding_of_its_own_counts_in_a_model_that_says_it_is_tied",)),
    Mutant("gguf-end-tokens-of-the-metadata-only", GGUF, "*ids, *(number for number, text in enumerate(tokens) if text in known)",
           "*ids", (f"{GGUF_TEST}::test_answers_end_where_they_end_in_llama_cpp",)),
    Mutant("gguf-scaling-needs-a-type", GGUF_SETTINGS, 'read("rope.scaling.type", "linear")',
           'read("rope.scaling.type", "none")',
           (ROPE,)),
    Mutant("gguf-old-scaling-unread", GGUF_SETTINGS, 'read("rope.scale_linear", 0)', "0", (ROPE,)),
    Mutant("gguf-unknown-settings-unread", GGUF, "if setting == name or", "if True or", (NAMED,)),
    Mutant("gguf-any-rule-of-splitting", GGUF, "and splits not in GPT2_SPLITS", "and False", (NAMED,)),
]  # fmt: skip
