"""A learner that listens and plays with whoever joins, until its standard input ends:

    python listening.py '{"listener": {"address": "unix:/tmp/x"}, "num_files": null}'

It prints its address. "num_files" may be the limits of its descriptors, soft and hard.
"""

import json
import resource
import sys
import threading

import numpy as np
import servers

from libtorchbeast import Listener, Security


def play_first(inputs):
    (observation, *_), state = inputs
    return (np.zeros(observation.shape[:2], np.int64),), state


def main():
    arguments = json.loads(sys.argv[1])
    if arguments["num_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, arguments["num_files"])
    security = Security(token=arguments["token"])
    listener = Listener(**arguments["listener"], security=security)
    listener.start()
    with servers.Run([], play_first, listener=listener, max_env_failures=1000) as run:
        drain = threading.Thread(target=lambda: [None for _ in run.queue])
        drain.start()
        sys.stdout.write(listener.address + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        run.pool.close()
        drain.join()
    listener.close()


if __name__ == "__main__":
    main()
