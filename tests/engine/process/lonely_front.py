"""A front end to be killed: starts a scripted engine, says its process id when it is stuck."""

import json
import sys
import threading
from pathlib import Path

from cadenza.config import EngineConfig
from cadenza.engine.front import EngineFront
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.request import Request, SamplingParams

SCRIPT = Path(__file__).with_name("scripted_child.py")


def main(script: str, command: str) -> None:
    # Nobody but the test ends the engine.
    watchdog = WatchdogTimeouts(hung_after_s=3600.0, load_hung_after_s=3600.0)
    options = ProcessOptions(command=(sys.executable, str(SCRIPT)), watchdog=watchdog)
    link = ProcessLink(script, EngineConfig(max_num_seqs=2), options)
    engine = EngineFront(link)
    told = threading.Event()

    def emit(_: object) -> None:
        told.set()

    threading.Thread(target=engine.serve, args=(emit,), daemon=True).start()
    if json.loads(script).get("load_s"):
        while engine.status().phase != "load":
            told.wait(0.01)
    else:
        engine.wait_ready(60)
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        engine.submit(Request(prompt_token_ids=(1,), params=params))
        told.wait(60)
        engine.submit(Request(prompt_token_ids=(int(command),), params=params))
        while command != "1" and not Path(json.loads(script)["stuck"]).exists():
            told.wait(0.01)
            told.clear()
    print(link.pid, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
