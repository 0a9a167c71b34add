"""A whole server process over the fake engine: `fake_server.py PORT GRACE_SECONDS JSON_ARGUMENTS`."""

from __future__ import annotations

import json
import sys
import threading
import traceback

sys.path.extend(__file__.rsplit("/", 1)[:1])

from fake_text import FakeText

from slimserve.engine.messages import EngineSpec
from slimserve.errors import SlimServeError
from slimserve.serve.server import ServerOptions, serve


def main() -> int:
    port, grace, arguments = int(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
    options = ServerOptions(names=("fake",), port=port, grace_seconds=grace)
    spec = EngineSpec("fake_engine:build", arguments)
    try:
        serve(spec, FakeText(), options, lambda *_: None, lambda info, url: print("ready", url, flush=True))
    except SlimServeError as error:
        print(f"ended: {error}", flush=True)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return 70
    print("left:", [thread.name for thread in threading.enumerate() if not thread.daemon], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
