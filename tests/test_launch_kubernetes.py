"""Manifests against those who will read them: Kubernetes' schemas, the operators' models, and our own checks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubeflow_trainer_api.models.io_k8s_api_batch_v1_job import IoK8sApiBatchV1Job
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from launch_jobs import FULL, SITE, example

from windlass.launch import kubernetes
from windlass.launch.job import job_of, name_letters
from windlass.launch.kubernetes import checks, pod
from windlass.launch.kubernetes.write import Note, plain, write

SCHEMA = "1.36"
ENGINES = ("job", "jobset", "pytorchjob", "trainer")


def manifests(engine: str, site: tuple[str, ...] = FULL, version: str = "2.3") -> list[dict[str, Any]]:
    plan, overrides, _ = example("train", site)
    return kubernetes.manifests(job_of(plan, overrides=overrides), engine, version)


def workload(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return documents[-1]


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Whole pod templates, wherever a kind keeps them."""
    spec = document.get("spec", {})
    if document["kind"] == "Job":
        return [spec["template"]]
    if document["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    if document["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    return []


def as_job(template: dict[str, Any]) -> dict[str, Any]:
    """A pod template inside a custom resource is looked at by nobody: wrapped as a Job, it is."""
    inner = copy.deepcopy(template)
    inner["spec"].setdefault("restartPolicy", "Never")
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": inner}}


@pytest.mark.parametrize("site", [SITE, FULL], ids=["site", "full"])
@pytest.mark.parametrize("engine", ENGINES)
def test_kubernetes_own_schemas_take_all_of_it(engine: str, site: tuple[str, ...]) -> None:
    documents = manifests(engine, site)
    for document in documents:
        if document["apiVersion"] in ("v1", "batch/v1"):
            kubernetes_validate.validate(document, SCHEMA, strict=True)
        for template in templates(document):
            kubernetes_validate.validate(as_job(template), SCHEMA, strict=True)


def test_the_schemas_would_object() -> None:
    document = workload(manifests("job"))
    document["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(document, SCHEMA, strict=True)


MODELS: dict[str, Any] = {
    "job": IoK8sApiBatchV1Job,
    "jobset": JobsetV1alpha2JobSet,
    "trainer": TrainerV1alpha1TrainJob,
}


@pytest.mark.parametrize("site", [SITE, FULL], ids=["site", "full"])
@pytest.mark.parametrize("engine", MODELS)
def test_nothing_is_lost_in_the_published_models(engine: str, site: tuple[str, ...]) -> None:
    document = workload(manifests(engine, site))
    again = MODELS[engine].from_dict(copy.deepcopy(document)).to_dict()
    assert lost(document, json.loads(json.dumps(again, default=str))) == []


def test_a_lost_field_would_be_noticed() -> None:
    document = workload(manifests("trainer"))
    document["spec"]["podSpecOverrides"] = [{"targetJobs": [{"name": "node"}]}]
    again = TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(document)).to_dict()
    assert any("podSpecOverrides" in one for one in lost(document, again))


def test_the_pytorchjob_in_its_operators_models() -> None:
    from kubeflow.training.models import KubeflowOrgV1PyTorchJob, KubeflowOrgV1PyTorchJobSpec, KubeflowOrgV1RunPolicy

    document = workload(manifests("pytorchjob"))
    for model, part in (
        (KubeflowOrgV1PyTorchJob, document),
        (KubeflowOrgV1PyTorchJobSpec, document["spec"]),
        (KubeflowOrgV1RunPolicy, document["spec"]["runPolicy"]),
    ):
        known = set(model.attribute_map.values())
        assert set(part) <= known, "a field that the operator does not have"
    assert isinstance(document["spec"]["nprocPerNode"], str), model.openapi_types


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict):
        after = after if isinstance(after, dict) else {}
        return [word for key, value in before.items() for word in lost(value, after.get(key), f"{path}.{key}")]
    if isinstance(before, list):
        after = after if isinstance(after, list) and len(after) == len(before) else [None] * len(before)
        return [word for i, (a, b) in enumerate(zip(before, after, strict=True)) for word in lost(a, b, f"{path}[{i}]")]
    return [] if before == after else [f"{path}: {before!r} -> {after!r}"]


@pytest.mark.parametrize("site", [SITE, FULL], ids=["site", "full"])
@pytest.mark.parametrize("engine", ENGINES)
def test_our_own_checks_are_content(engine: str, site: tuple[str, ...]) -> None:
    assert checks.problems(manifests(engine, site)) == []


# --- broken on purpose ----------------------------------------------------------------------------------------------


def spec_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = workload(documents)["spec"]["template"]["spec"]
    return found


def container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = spec_of(documents)["containers"][0]
    return found


def patch(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod inside a TrainJob's patch."""
    runtime = workload(documents)["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    found: dict[str, Any] = runtime["replicatedJobs"][0]["template"]["spec"]["template"]
    return found


def put(holder: dict[str, Any], **values: Any) -> Any:
    holder.update(values)


BROKEN: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Any], str]] = {
    # name: (engine, what is done to it, what must be said)
    "name in capitals": ("job", lambda d: put(workload(d)["metadata"], name="Run_1"), "is no name"),
    "name too long": ("job", lambda d: put(workload(d)["metadata"], name="a" * 60), "more than 47"),
    "name too long for so many nodes": ("jobset", lambda d: [
        put(workload(d)["metadata"], name="a" * 47),
        put(workload(d)["spec"]["replicatedJobs"][0]["template"]["spec"], completions=101, parallelism=101),
    ], "more than 46"),
    "no name": ("job", lambda d: workload(d)["metadata"].pop("name"), "has no name"),
    "unknown kind": ("job", lambda d: put(workload(d), kind="Jobb"), "unknown kind"),
    "wrong version": ("job", lambda d: put(workload(d), apiVersion="batch/v1beta1"), "Job is of batch/v1"),
    "bad namespace": ("job", lambda d: [put(one["metadata"], namespace="a.b") for one in d], "is no namespace"),
    "two namespaces": ("job", lambda d: put(d[0]["metadata"], namespace="other"), "different namespaces"),
    "label with a space": ("job", lambda d: workload(d)["metadata"]["labels"].update({"a": "b c"}), "is no label"),
    "label a number": ("job", lambda d: workload(d)["metadata"]["labels"].update({"a": 1}), "must be text"),
    "annotation key": ("job", lambda d: workload(d)["spec"]["template"]["metadata"]["annotations"].update({"a b": ""}),
                       "is no key"),
    "misspelt field": ("job", lambda d: put(spec_of(d), nodeSelectors={}), "no such field"),
    "misspelt field of a container": ("job", lambda d: put(container(d), volumeMount=[]), "no such field"),
    "field of the job in the pod": ("job", lambda d: put(container(d), restartPolicy="Never"), "no such field"),
    "text for a list": ("job", lambda d: put(container(d), command="bash launch.sh"), "must be a list"),
    "list for a mapping": ("job", lambda d: put(container(d), resources=[]), "must be a mapping"),
    "text for a number": ("job", lambda d: put(workload(d)["spec"], backoffLimit="3"), "must be a whole number"),
    "number for a text": ("job", lambda d: container(d)["env"].append({"name": "A", "value": 1}), "must be text"),
    "truth for a text": ("job", lambda d: container(d)["env"].append({"name": "A", "value": True}), "must be text"),
    "bad quantity": ("job", lambda d: put(container(d)["resources"]["limits"], memory="64GB"), "is no quantity"),
    "memory without a unit": ("job", lambda d: put(container(d)["resources"]["limits"], memory="8996"),
                              "less than 1 MiB"),
    "request above limit": ("job", lambda d: put(container(d)["resources"]["limits"], memory="1Gi"), "is the limit"),
    "device without limit": ("job", lambda d: container(d)["resources"]["limits"].pop("nvidia.com/gpu"),
                             "asked for as they are limited"),
    "device request other than limit": ("job", lambda d: put(container(d)["resources"]["requests"],
                                                             **{"nvidia.com/gpu": "2"}), "as they are limited"),
    "half a device": ("job", lambda d: put(container(d)["resources"]["limits"], **{"nvidia.com/gpu": "500m"}),
                      "no whole number of devices"),
    "device without a domain": ("job", lambda d: put(container(d)["resources"]["limits"], gpu="1"), "no such resource"),
    "variable twice": ("job", lambda d: container(d)["env"].append(dict(container(d)["env"][0])), "is set twice"),
    "variable of the launcher": ("job", lambda d: container(d)["env"].append({"name": "PET_NNODES", "value": "3"}),
                                 "is set by what starts the ranks"),
    "the launcher's group": ("job", lambda d: container(d)["env"].append({"name": "GROUP_RANK", "value": "0"}),
                             "take it out of cluster.env"),
    "visible devices": ("job", lambda d: container(d)["env"].append({"name": "CUDA_VISIBLE_DEVICES", "value": "0"}),
                        "is set by what starts the ranks"),
    "no variable's name": ("job", lambda d: container(d)["env"].append({"name": "A-B C", "value": ""}), "no variable"),
    "value and secret": ("job", lambda d: put(container(d)["env"][-1], value="hf_x"), "either value or valueFrom"),
    "secret without key": ("job", lambda d: container(d)["env"][-1]["valueFrom"]["secretKeyRef"].pop("key"),
                           "a key in it"),
    "mount without volume": ("job", lambda d: container(d)["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
                             "there is no volume 'x'"),
    "volume without mount": ("job", lambda d: spec_of(d)["volumes"].append({"name": "x", "emptyDir": {}}),
                             "x is mounted nowhere"),
    "volume twice": ("job", lambda d: spec_of(d)["volumes"].append(spec_of(d)["volumes"][0]), "is there twice"),
    "volume of two kinds": ("job", lambda d: put(spec_of(d)["volumes"][0], emptyDir={}), "of one kind"),
    "path mounted twice": ("job", lambda d: put(container(d)["volumeMounts"][-1], mountPath="/dev/shm/"),
                           "is mounted twice"),
    "relative mount": ("job", lambda d: put(container(d)["volumeMounts"][-1], mountPath="data"), "no absolute path"),
    "no such ConfigMap": ("job", lambda d: d.pop(0), "is mounted, and is not here"),
    "ConfigMap too large": ("job", lambda d: d[0]["data"].update(a="x" * 1_100_000), "more than 1 MiB"),
    "shm above memory": ("job", lambda d: put(spec_of(d)["volumes"][1]["emptyDir"], sizeLimit="128Gi"),
                         "/dev/shm counts"),
    "no image": ("job", lambda d: put(container(d), image=""), "no image"),
    "image with a space": ("job", lambda d: put(container(d), image="a b"), "no image"),
    "no command": ("job", lambda d: container(d).pop("command"), "nothing is started"),
    "no containers": ("job", lambda d: put(spec_of(d), containers=[]), "there is none"),
    "no grace": ("job", lambda d: put(spec_of(d), terminationGracePeriodSeconds=0), "no time to save"),
    "fewer pods than nodes": ("job", lambda d: put(workload(d)["spec"], parallelism=1), "both are the number of nodes"),
    "not indexed": ("job", lambda d: put(workload(d)["spec"], completionMode="NonIndexed"), "must be Indexed"),
    "restarts with a failure policy": ("job", lambda d: put(spec_of(d), restartPolicy="OnFailure"),
                                       "only with restartPolicy: Never"),
    "policy for another container": ("job", lambda d: put(workload(d)["spec"]["podFailurePolicy"]["rules"][0]
                                                          ["onExitCodes"], containerName="main"), "is called main"),
    "policy on success": ("job", lambda d: put(workload(d)["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"],
                                               values=[0, 13]), "0 is no failure"),
    "no Service": ("job", lambda d: d.pop(1), "node 0 would have no name"),
    "another's Service": ("job", lambda d: put(d[1]["spec"], selector={"app": "x"}), "does not select the pods"),
    "Service with an address": ("job", lambda d: d[1]["spec"].pop("clusterIP"), "only a headless Service"),
    "Service waits for ready": ("job", lambda d: d[1]["spec"].pop("publishNotReadyAddresses"), "look for node 0"),
    "deadline of nothing": ("job", lambda d: put(workload(d)["spec"], activeDeadlineSeconds=0), "at least 1"),
    "host network": ("job", lambda d: put(spec_of(d), hostNetwork=True), "is not admitted"),
    "host path": ("job", lambda d: spec_of(d)["volumes"].append({"name": "x", "hostPath": {"path": "/dev"}}),
                  "hostPath is not admitted"),
    "privileged": ("job", lambda d: put(container(d)["securityContext"], privileged=True), "is not admitted"),
    "IPC_LOCK": ("job", lambda d: container(d)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
                 "raise memlock on the node"),
    "toleration": ("job", lambda d: spec_of(d)["tolerations"].append({"key": "a", "operator": "Exists", "value": "b"}),
                   "or Exists without one"),
    "toleration's effect": ("job", lambda d: put(spec_of(d)["tolerations"][0], effect="Never"), "unknown effect"),
    "same object twice": ("job", lambda d: d.append(copy.deepcopy(d[1])), "is there twice"),
    "no replicated jobs": ("jobset", lambda d: put(workload(d)["spec"], replicatedJobs=[]), "is empty"),
    "jobset's rule": ("jobset", lambda d: put(workload(d)["spec"]["failurePolicy"]["rules"][0], action="FailJob"),
                      "unknown action"),
    "jobset's rule by a name with a dash": ("jobset", lambda d: put(
        workload(d)["spec"]["failurePolicy"]["rules"][0], name="wrong-input"), "is no name of a rule"),
    "jobset's reason": ("jobset", lambda d: put(workload(d)["spec"]["failurePolicy"]["rules"][0],
                                                onJobFailureReasons=["Deadline"]), "is no reason"),
    "a pod inside a jobset": ("jobset", lambda d: put(templates(workload(d))[0]["spec"]["containers"][0], image=""),
                              "no image"),
    "no master": ("pytorchjob", lambda d: workload(d)["spec"]["pytorchReplicaSpecs"].pop("Master"), "one Master"),
    "two masters": ("pytorchjob", lambda d: put(workload(d)["spec"]["pytorchReplicaSpecs"]["Master"], replicas=2),
                    "one Master"),
    "container's name": ("pytorchjob", lambda d: put(templates(workload(d))[1]["spec"]["containers"][0], name="node"),
                         "no container is called pytorch"),
    "processes as a number": ("pytorchjob", lambda d: put(workload(d)["spec"], nprocPerNode=8), "must be text"),
    "manager without a path": ("trainer", lambda d: put(workload(d)["spec"]["runtimePatches"][0], manager="windlass"),
                               "no domain with a path"),
    "two versions at once": ("trainer", lambda d: put(workload(d)["spec"], podSpecOverrides=[]), "different versions"),
    "processes as text": ("trainer", lambda d: put(workload(d)["spec"]["trainer"], numProcPerNode="1"), "a number"),
    "PET_ in trainer.env": ("trainer", lambda d: workload(d)["spec"]["trainer"]["env"].append(
        {"name": "PET_NNODES", "value": "3"}), "the runtime's to set"),
    "environment in a patch": ("trainer", lambda d: put(patch(d)["spec"]["containers"][0], env=[]), "can't be patched"),
    "resources in a patch": ("trainer", lambda d: put(patch(d)["spec"]["containers"][0], resources={}),
                             "can't be patched"),
    "a patch of nothing": ("trainer", lambda d: put(workload(d)["spec"]["runtimePatches"][0], trainingRuntimeSpec={}),
                           "changes nothing"),
    "no runtime": ("trainer", lambda d: put(workload(d)["spec"]["runtimeRef"], name=""), "names no runtime"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manifest_is_rejected_with_its_place(name: str) -> None:
    engine, damage, says = BROKEN[name]
    documents = copy.deepcopy(manifests(engine))
    damage(documents)
    found = checks.problems(documents)
    assert any(says in f"{problem.problem} {problem.hint}" for problem in found), [str(one) for one in found]
    assert all(problem.where.startswith("job.yaml") for problem in found)
    assert all(problem.hint for problem in found), "the next step, also where it is to report what windlass wrote"


def test_there_are_enough_of_them() -> None:
    assert len(BROKEN) >= 40


@pytest.mark.parametrize("document", [None, [], "x", {}, {"kind": "Job"}, {"kind": "Job", "spec": []}])
def test_what_is_no_manifest_at_all_is_said(document: Any) -> None:
    assert checks.problems([document])


# --- as text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_text_is_the_data_and_has_its_reasons(engine: str) -> None:
    plan, overrides, _ = example("train", FULL)
    job = job_of(plan, overrides=overrides)
    text = kubernetes.texts(job, engine)["job.yaml"]
    assert list(yaml.safe_load_all(text)) == kubernetes.manifests(job, engine)
    assert "# ranks of one node exchange data here" in text
    assert "launch.sh: |" in text, "files stand there to be read"


_KEYS = st.text(min_size=1, max_size=8).filter(str.isprintable)
_SCALARS = st.one_of(st.text(max_size=30), st.integers(), st.booleans(), st.none(), st.sampled_from(["no", "1e3", "~"]))
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(_KEYS, inner, max_size=3),
        st.builds(Note, inner, st.just("why\nand why")),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(_KEYS, _TREES, min_size=1, max_size=4))
def test_any_tree_is_read_back_as_it_was(tree: dict[str, Any]) -> None:
    text = write([tree, {"a": 1}], "heading")
    assert list(yaml.safe_load_all(text)) == [plain(tree), {"a": 1}]


@pytest.mark.parametrize("value", ["plain", "$HOME", "$(HOME)", "a$$b", "$$(X)", "$", "$$", "cost $5 $(x)$"])
def test_variables_reach_the_pod_literally(value: str) -> None:
    assert expanded(pod.literally(value)) == value


def expanded(text: str) -> str:
    """Kubernetes' rule (third_party/forked/golang/expansion): $$ is $, $(NAME) is another variable."""
    out, i = "", 0
    while i < len(text):
        if text[i] == "$" and i + 1 < len(text) and text[i + 1] == "$":
            out, i = out + "$", i + 2
        elif text.startswith("$(", i) and ")" in text[i:]:
            out, i = out + "EXPANDED", text.index(")", i) + 1
        else:
            out, i = out + text[i], i + 1
    return out


def test_openshift_admits_it_unless_the_run_file_asks_for_more() -> None:
    """restricted-v2: no user of our own, no privilege, all capabilities dropped, the default seccomp profile."""
    documents = manifests("job", SITE)
    assert "runAsUser" not in json.dumps(documents)
    context = container(documents)["securityContext"]
    assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert spec_of(documents)["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": True,  # the Pod Security level `restricted` refuses pods that leave it out
    }
    assert "runAsUser" in json.dumps(manifests("job", FULL))
    root = manifests("job", (*SITE, "cluster.user={uid: 0}"))
    assert spec_of(root)["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsUser": 0}


@pytest.mark.parametrize("nodes", [1, 10, 11, 100, 101, 1000, 1001])
def test_the_longest_name_leaves_room_for_a_jobsets_pods(nodes: int) -> None:
    assert len("a" * name_letters(nodes) + f"-node-0-{nodes - 1}-abcde") <= 63
    long = (*SITE, f"cluster.nodes={nodes}", "train.output_dir=/data/" + "a-" * 40)
    plan, overrides, _ = example("train", long)
    assert checks.problems(kubernetes.manifests(job_of(plan, overrides=overrides), "jobset")) == []


def test_a_stop_that_saved_is_not_counted() -> None:
    inner = workload(manifests("jobset"))["spec"]["replicatedJobs"][0]["template"]["spec"]
    for spec in (workload(manifests("job"))["spec"], inner):
        (rule,) = [
            one for one in spec["podFailurePolicy"]["rules"] if 75 in one.get("onExitCodes", {}).get("values", ())
        ]
        assert rule["action"] == "Ignore"
        assert rule["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_a_pytorchjob_is_restarted_as_often_as_the_run_file_says(restarts: int) -> None:
    """By the operator's own sum: over pods, and a limit that is reached is past."""
    spec = workload(manifests("pytorchjob", (*SITE, f"cluster.max_restarts={restarts}")))["spec"]
    limit, pods = (
        spec["runPolicy"]["backoffLimit"],
        sum(one["replicas"] for one in spec["pytorchReplicaSpecs"].values()),
    )

    def past(restarted: int) -> bool:
        return restarted > 0 if limit == 0 else restarted >= limit

    assert pods == 3
    assert not past(restarts * pods), "all of them have restarted so often"
    assert past(restarts * pods + 1)


def test_a_jobset_whose_time_is_over_is_not_begun_again() -> None:
    def reasons(site: tuple[str, ...]) -> set[str]:
        rules = workload(manifests("jobset", site))["spec"]["failurePolicy"]["rules"]
        assert {rule["action"] for rule in rules} == {"FailJobSet"}
        assert len({rule["name"] for rule in rules}) == len(rules)
        return {reason for rule in rules for reason in rule["onJobFailureReasons"]}

    assert reasons(FULL) == {"PodFailurePolicy", "DeadlineExceeded"}
    assert reasons(SITE) == {"PodFailurePolicy"}


def test_wrong_input_is_not_tried_again_and_a_lost_node_is_not_counted() -> None:
    for engine, rules in (
        ("job", workload(manifests("job"))["spec"]["podFailurePolicy"]["rules"]),
        (
            "jobset",
            workload(manifests("jobset"))["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"],
        ),
    ):
        assert rules[0]["action"] == "FailJob", engine
        assert rules[0]["onExitCodes"]["values"] == [13]
        assert rules[1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    jobset = workload(manifests("jobset"))["spec"]["failurePolicy"]["rules"][0]
    assert (jobset["action"], jobset["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
