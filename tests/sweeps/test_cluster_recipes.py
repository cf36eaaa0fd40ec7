"""docs/cluster: manifests that their own tools take, and commands that ours does."""

import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dpfp_ray.cli.main import build_parser
from dpfp_ray.cli.options import split_change
from dpfp_ray.sweeps.cluster import plan_resources
from dpfp_ray.sweeps.space import read_search_space

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "cluster"
# Fields of KubeRay's API ray.io/v1 (ray-operator/apis/ray/v1 in its repository) that we use.
JOB = {"entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
JOB |= {"submissionMode", "runtimeEnvYAML", "backoffLimit", "activeDeadlineSeconds", "metadata"}
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "authOptions", "autoscalerOptions"}
CLUSTER |= {"enableInTreeAutoscaling"}
GROUP = {"rayStartParams", "template", "groupName", "maxReplicas", "minReplicas", "replicas"}


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load((RECIPES / "rayjob.yaml").read_text())


def groups(job: Any) -> list[Any]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_job_has_only_fields_that_kuberay_knows(job: Any) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job["spec"]) <= JOB
    assert set(job["spec"]["rayClusterSpec"]) <= CLUSTER
    head, *workers = groups(job)
    assert {"rayStartParams", "template"} <= set(head) <= GROUP
    for group in workers:
        assert {"groupName", "rayStartParams", "template"} <= set(group) <= GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_pods_are_what_kubernetes_accepts_and_run_the_ray_that_is_pinned(job: Any) -> None:
    for group in groups(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        pod["spec"] = group["template"]["spec"]
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}" in pins


def test_the_jobs_command_is_one_of_ours_on_the_share_and_runs_eight_trials(job: Any) -> None:
    head, *workers = groups(job)
    nodes: list[dict[str, float]] = [{"CPU": float(head["rayStartParams"]["num-cpus"])}]
    for group in workers:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        node = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
        nodes += [node] * group["replicas"]
    arguments = parse(job["spec"]["entrypoint"])
    assert plan_resources(nodes, arguments.workers, gpus=arguments.gpus_per_worker).slots == 8
    (mount,) = head["template"]["spec"]["containers"][0]["volumeMounts"]
    assert arguments.storage.startswith(f"{mount['mountPath']}/")
    space = ROOT / Path(arguments.space).relative_to("/app")
    changes = dict(split_change(text) for text in arguments.changes)
    assert read_search_space(space, {**changes, "samples": arguments.samples}).samples == 64


@pytest.mark.parametrize("recipe", ["ray-up.yaml", "ray-up-gcp.yaml"])
def test_ray_takes_the_cluster_that_ray_up_would_start(recipe: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    full = prepare_config(yaml.safe_load((RECIPES / recipe).read_text()))
    validate_config(full)
    gpus = full["available_node_types"]["gpu"]
    assert gpus["min_workers"] * gpus["resources"]["GPU"] == 8


def test_the_image_has_everything_that_the_package_is_made_of() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (RECIPES / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert {"dpfp_ray", "search_spaces", "dashboards", "constraints.txt"} <= names
    assert all((ROOT / name).exists() for name in names)


def commands() -> list[str]:
    """Every `dpfp …` line of the pages' shell blocks."""
    pages = (ROOT / "docs" / "cluster.md", ROOT / "dashboards" / "README.md")
    blocks = re.findall(r"```sh\n(.*?)```", "".join(p.read_text() for p in pages), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("dpfp ")]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_are_commands(command: str) -> None:
    arguments = parse(command)
    if arguments.verb == "submit":
        parse("dpfp " + shlex.join(word for word in arguments.job if word != "--"))


def parse(command: str) -> Any:
    program, *rest = shlex.split(command)
    assert program == "dpfp"
    return build_parser().parse_args(rest)
