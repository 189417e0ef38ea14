"""What studies and runs that rest on other runs may be given."""

from __future__ import annotations

from bad_input.row import Row

BENCH = "eval bench --target {target} --prompts {chats} --limit 1 --repeats 1 --output {out} "
LOAD = "eval load --target {target} --prompts {chats} --output {out} "
SERVER = f"{LOAD}--server http://127.0.0.1:9 "

ROWS = [
    Row("bench: costs of no run", f"{BENCH}--costs ./nosuch", ("costs", "nosuch", "results.json")),
    Row("bench: costs of a model", f"{BENCH}--costs {{target}}", ("costs", "results.json")),
    Row("bench: costs of a run that measured none", f"{BENCH}--costs {{bench}}", ("costs", "without measured costs")),
    Row("load: users that are none", f"{LOAD}--concurrency 1,x", ("concurrency", "1,x", "numbers")),
    Row("load: no user", f"{LOAD}--concurrency 0,2", ("concurrency", "0,2", "above 0")),
    Row("load: a rate below 0", f"{LOAD}--rates=-1", ("rates", "-1", "above 0")),
    Row("load: a rate without end", f"{LOAD}--rates inf", ("rates", "inf", "above 0")),
    Row("load: no request", f"{LOAD}--requests 0", ("requests", "0", "1 or more")),
    Row("load: warm-up below 0", f"{LOAD}--warmup=-1", ("warmup", "-1")),
    Row("load: a goal that nobody meets", f"{LOAD}--goal-ttft-ms 0", ("goal_ttft_ms", "0", "above 0")),
    Row("load: CPU time of threads", f"{LOAD}--clock cpu --num-threads 2", ("clock", "2 threads", "wall")),
    Row("load: no draft", f"{LOAD}--methods spec:k=2", ("spec:k=2", "--draft")),
    Row("load: a method for one row", f"{LOAD}--methods hf", ("methods", "hf")),
    Row("load: an engine for one row", f"{LOAD}--engine hf", ("engine", "hf", "lean")),
    Row("load: costs of no run", f"{LOAD}--costs ./nosuch", ("costs", "nosuch")),
    Row("load: methods of a server", f"{SERVER}--methods ar", ("methods", "--server", "one of the two")),
    Row("load: a draft for a server", f"{SERVER}--draft {{draft}}", ("draft", "--server")),
    Row("load: a server's CPU time", f"{SERVER}--clock cpu", ("clock", "--server", "wall")),
    Row("load: nobody there", SERVER, ("server", "127.0.0.1:9", "ConnectError")),
    Row("load: no address", f"{LOAD}--server nowhere", ("server.url", "nowhere", "http://HOST:PORT")),
    Row("load: one server twice", f"{SERVER[:-1]},http://127.0.0.1:8", ("server", "twice", "NAME=URL")),
]
