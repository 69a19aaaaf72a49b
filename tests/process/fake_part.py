"""A process that behaves as a part of a replica may: `python fake_part.py ready-file behaviour`.

serve           report ready, end with status 0 on SIGTERM
stubborn        report ready, ignore SIGTERM
mute            never report ready, ignore SIGTERM
parent          as serve, and leave a child process behind
chatty          as serve, and print without end
beat            as serve, and show that it lives, as long as it is not stopped; it says so once a second, too
stop-when FILE  as beat; once FILE exists, remove it and stop before the first beat
crash           end with status 3 before being ready
last-words      the same, and say why as our own parts do
crash-when FILE report ready, end with status 4 once FILE exists
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main(ready: Path, behaviour: str, *arguments: str) -> int:
    terminated = []
    if behaviour == "crash":
        print("first line\nthe model is upside down", file=sys.stderr)
        return 3
    if behaviour == "last-words":
        print("CRITICAL fake: no words", "CRITICAL fake: the model is upside down", sep="\n", file=sys.stderr)
        return 3
    if behaviour == "stop-when" and Path(arguments[0]).exists():
        Path(arguments[0]).unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    handler = signal.SIG_IGN if behaviour in ("stubborn", "mute") else lambda *_: terminated.append(True)
    signal.signal(signal.SIGTERM, handler)
    if behaviour == "parent":
        child = subprocess.Popen(["sleep", "600"])
        print("child", child.pid)
    print("pid", os.getpid())
    if behaviour != "mute":
        ready.touch()
    beats = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    reported_at = time.monotonic()
    while not terminated:
        if behaviour in ("beat", "stop-when"):
            beats.sendto(b"WATCHDOG=1", os.environ["NOTIFY_SOCKET"].replace("@", "\0"))
            if time.monotonic() > reported_at + 1.0:
                reported_at = time.monotonic()
                print("still here")
        if behaviour == "crash-when" and Path(arguments[0]).exists():
            print("out of luck")
            return 4
        if behaviour == "chatty":
            print("\n".join(20 * [100 * "."]))
        time.sleep(0.01)
    print("stopped in good order")
    return 0


sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
