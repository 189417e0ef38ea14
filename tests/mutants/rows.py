"""Mutants of what data prompts reads of a row, of masks, and of later turns."""

from __future__ import annotations

from mutants.mutant import Mutant

TEMPLATE, CONVERSATIONS, SOURCES = (f"data/text/{name}.py" for name in ("template", "conversations", "sources"))
MASKS, ROWS, LATER = (f"tests/data/text/{name}_test.py" for name in ("template", "rows", "later_turns"))

MUTANTS = [
    Mutant("mask-ends-behind-a-joined-token", TEMPLATE, "num_common(encode(tokenizer, text[:end]), ids)",
           "len(encode(tokenizer, text[:end]))", (MASKS,)),
    Mutant("mask-on-the-line-break-behind-an-answer", TEMPLATE, "        end = start + ended.end(1)", "        pass",
           (MASKS,)),
    Mutant("mask-without-the-end-token-of-earlier-answers", TEMPLATE, "closing = re.match", "closing = None and re.match",
           (MASKS,)),
    Mutant("mask-without-thoughts", TEMPLATE, "start = len(head) if start is None else start", "start = len(head)",
           (MASKS,)),
    Mutant("mask-on-answers-of-weight-0", TEMPLATE, "left_out = [found[number] for number in not_learned]",
           "left_out = []", (MASKS,)),
    Mutant("weights-one-message-early", CONVERSATIONS, "not_learned = [i + 1 for i in not_learned]", "pass", (ROWS,)),
    Mutant("arguments-as-text-in-text", CONVERSATIONS, '{"arguments": _parse_json(function["arguments"])}',
           '{"arguments": function["arguments"]}', (ROWS,)),
    Mutant("nulls-of-other-rows-are-arguments", SOURCES, "for key, inner in value.items() if inner is not None}",
           "for key, inner in value.items()}", (ROWS,)),
    Mutant("date-of-the-day-that-asks", TEMPLATE, 'if date is None or "strftime_now" not in template:', "if True:",
           (MASKS, LATER)),
    Mutant("calls-end-as-answers-do", TEMPLATE, 'if following[0]["role"] == "tool" and behind[0] in special:',
           "if False:", (LATER,)),
    Mutant("structure-of-the-last-answer-alone", TEMPLATE, "if not repeated and special", "if special", (LATER,)),
]  # fmt: skip
