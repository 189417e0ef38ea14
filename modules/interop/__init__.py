"""Public formats, one file each: pure maps between our state dicts and what other systems write and read.

`FORMATS` names the files that hold a head; `base` says what each of them has.
"""

# Format -> kind of head. A format's file is its name.
FORMATS = {
    **dict.fromkeys(("eagle", "vllm", "sglang"), "eagle"),
    **dict.fromkeys(("specdec_pp", "acceptance"), "acceptance"),
}
