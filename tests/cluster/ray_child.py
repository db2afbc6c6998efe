"""A Ray cluster of three nodes on this machine, with the application on it; run as a script.

Ray is for a process of its own. The argument is a JSON object: `port`, and `flags` of the
application. After `ready` it obeys lines of its input: `engine` kills an engine's replica,
`process` an engine's process, `node` takes a node away and adds another one, `count` tells how many
engine replicas run. Each is answered by one line; at the end of the input it shuts Ray down.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
os.environ.setdefault("RAY_raylet_start_wait_time_s", "240")
os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")

import ray
from ray import serve
from ray.cluster_utils import Cluster

from cadenza.serve_app import app

REPLICA = "ray::ServeReplica:default:Engine"
PROCESS = "cadenza.loading.engine_program"
HAPROXY = "haproxy-serve"
ENGINE = {"num_cpus": 0.5, "resources": {"engine": 0.1}}
FRONT = {"num_cpus": 0, "resources": {"front": 0.1}}
NODE_BYTES = 100 << 20


def pids(command: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", command], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


class Nodes:
    """The head, which has the front ends, and two nodes of engines."""

    def __init__(self) -> None:
        self._generator = random.Random(5)
        own = {"num_cpus": 1, "object_store_memory": NODE_BYTES}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={**own, "resources": {"front": 1}, "include_dashboard": False},
        )
        self._own = {**own, "resources": {"engine": 1}}
        self._engines = [self.cluster.add_node(**self._own) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False)

    def obey(self, command: str) -> str:
        if command == "count":
            return str(len(pids(REPLICA)))
        if command == "node":
            lost = self._engines.pop(0)
            self.cluster.remove_node(lost, allow_graceful=False)
            self._engines.append(self.cluster.add_node(**self._own))
            return "lost"
        found = pids({"engine": REPLICA, "process": PROCESS}[command])
        if found:
            os.kill(self._generator.choice(found), signal.SIGKILL)
        return f"one of {len(found)}"


def main(port: int, flags: dict[str, object]) -> None:
    before = set(pids(HAPROXY))
    nodes = Nodes()
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"engine_resources": ENGINE, "front_resources": FRONT, **flags}))
        print("ready", flush=True)
        for line in sys.stdin:
            print(nodes.obey(line.strip()), flush=True)
        serve.shutdown()
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
        time.sleep(0.5)
        for each in set(pids(HAPROXY)) - before:  # Ray leaves it alive
            os.kill(each, signal.SIGKILL)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
