"""Manifests: golden files, their readers (Kubernetes' schemas, the operators' models), and what is refused."""

import copy
import json
import re
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_jobs import EVERY, EXAMPLES, FULL, SITE, client_model, compared, example, lost, plan_of, render, workload_of
from refusals import refused

from windlass import run_folder
from windlass.errors import UserError
from windlass.launch.job import JobVariable, build_job
from windlass.launch.platforms import kubernetes, pod, runai
from windlass.runfile.machines import Volume

SCHEMA = "1.36"
MODELS = {
    "job": "kubeflow_trainer_api.models.io_k8s_api_batch_v1_job.IoK8sApiBatchV1Job",
    "jobset": "kubeflow_trainer_api.models.jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
    "trainer": "kubeflow_trainer_api.models.trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
}
ENGINES = ("job", "jobset", "pytorchjob", "trainer")


def manifests(engine: str, site: tuple[str, ...] = FULL) -> list[dict[str, Any]]:
    plan, overrides, _ = example("train", site)
    return list(yaml.safe_load_all(kubernetes.render_job_yaml(build_job(plan, overrides=overrides), engine)))


def every(engine: str) -> tuple[str, ...]:
    """Set all options that the engine has a field for."""
    refused = {f"cluster.kubernetes.{key}" for key in pod.REFUSED.get(engine, {})}
    return tuple(word for word in EVERY if word.partition("=")[0] not in refused)


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates, wherever a kind keeps them."""
    spec = document.get("spec", {})
    if document["kind"] == "Job":
        return [spec["template"]]
    if document["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    if document["kind"] == "PyTorchJob":
        return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    return []


def pods_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is known of the pods; of a TrainJob, its changes to the runtime's."""
    if document["kind"] != "TrainJob":
        return pod_templates(document)
    (patch,) = document["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]]


@pytest.mark.parametrize("engine", ["job", "pytorchjob", "trainer"])  # the platforms' examples have a JobSet
def test_golden_manifests(engine: str) -> None:
    plan, overrides, _ = example("train", (*SITE, f"cluster.kubernetes.engine={engine}"))
    made = render(plan, "kubernetes", overrides=overrides)
    compared(f"train/kubernetes/{engine}.yaml", workload_of(made["job.yaml"]))


def test_one_node_needs_no_other() -> None:
    """No Service, no workers, no address of node 0."""
    for engine in ENGINES:
        job = build_job(example("two-gpus")[0])
        documents = list(yaml.safe_load_all(kubernetes.render_job_yaml(job, engine)))
        assert [document["kind"] for document in documents][:-1] == ["ConfigMap"]
        for template in pod_templates(documents[-1]):
            assert "subdomain" not in template["spec"]
            names = {variable["name"] for variable in template["spec"]["containers"][0]["env"]}
            assert not {"MASTER_ADDR", "MASTER_PORT"} & names
        spec = documents[-1]["spec"]
        if engine == "job":
            assert (spec["completions"], spec["parallelism"]) == (1, 1)
        if engine == "pytorchjob":
            assert list(spec["pytorchReplicaSpecs"]) == ["Master"]
            assert spec["runPolicy"]["backoffLimit"] == 4


@pytest.mark.parametrize("site", [SITE, EVERY], ids=["site", "every"])
@pytest.mark.parametrize("engine", ENGINES)
def test_servers_dry_run_accepts_all_manifests(engine: str, site: tuple[str, ...]) -> None:
    """Also what no schema checks: names of mounted files, of the Service, of containers in rules."""
    documents = manifests(engine, every(engine) if site is EVERY else site)
    workload = documents[-1]
    assert len({(one["kind"], one["metadata"]["name"]) for one in documents}) == len(documents)
    assert {one["metadata"]["namespace"] for one in documents} == {"ml"}
    assert f'"configMap": {{"name": "{documents[0]["metadata"]["name"]}"}}' in json.dumps(workload)
    for document in documents:
        if document["apiVersion"] in ("v1", "batch/v1", "networking.k8s.io/v1"):
            kubernetes_validate.validate(document, SCHEMA, strict=True)
    for template in pod_templates(workload):  # inside a custom resource nobody validates it: wrapped as a Job
        pod = copy.deepcopy(template)
        pod["spec"].setdefault("restartPolicy", "Never")
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": pod}}
        kubernetes_validate.validate(job, SCHEMA, strict=True)
        (container,) = template["spec"]["containers"]
        assert container["name"] == ("pytorch" if engine == "pytorchjob" else "node")
        assert {"subPath", "readOnly"} <= {key for mount in container["volumeMounts"] for key in mount} or site != EVERY
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert sorted(mounts) == sorted(volume["name"] for volume in template["spec"]["volumes"])
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert {k: v for k, v in limits.items() if "/" in k} == {k: v for k, v in requests.items() if "/" in k}
    if engine == "job":
        service = documents[1]
        assert workload["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": workload["metadata"]["name"]}
    if engine in MODELS:
        again = client_model(MODELS[engine]).from_dict(copy.deepcopy(workload)).to_dict()
        assert lost(workload, json.loads(json.dumps(again, default=str))) == []
        return
    for model, part in (
        ("PyTorchJob", workload),
        ("PyTorchJobSpec", workload["spec"]),
        ("RunPolicy", workload["spec"]["runPolicy"]),
    ):
        known = client_model(f"kubeflow.training.models.KubeflowOrgV1{model}").attribute_map
        assert set(part) <= set(known.values()), "a field that the operator does not have"
    assert isinstance(workload["spec"]["nprocPerNode"], str)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_reaches_job_and_pods(engine: str) -> None:
    """Where the engine has a place for it; an engine without one refuses it by name."""
    documents = manifests(engine, every(engine))
    workload, pods = documents[-1], pods_of(documents[-1])
    by_kind = {document["kind"]: document for document in documents}
    for metadata in (workload["metadata"], *(one["metadata"] for one in pods)):
        assert {"cost-center": "a1", "no": "true"}.items() <= metadata["labels"].items()
        assert metadata["annotations"]["site/contact"] == "ml@site, room 1"
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "urgent"
    for one in pods:
        key = "kueue.x-k8s.io/podset-preferred-topology"
        assert one["metadata"]["annotations"][key] == "topology.kubernetes.io/zone"
        assert "queue-name" not in str(one["metadata"])
        context = one["spec"]["securityContext"]
        assert (context["fsGroup"], context["supplementalGroups"]) == (0, [5000, 5001])
        sources = {next(iter(set(volume) - {"name"})): volume for volume in one["spec"]["volumes"][2:]}
        assert sources["configMap"]["configMap"] == {"name": "ca"}
        assert sources["secret"]["secret"] == {"secretName": "netrc"}
        assert sources["emptyDir"]["emptyDir"] == {"sizeLimit": "1Gi", "medium": "Memory"}
        mounts = {mount["mountPath"]: mount for mount in one["spec"]["containers"][0]["volumeMounts"]}
        assert {"subPath": "a/b", "readOnly": True}.items() <= mounts["/models"].items()
        assert mounts["/etc/ssl/site.crt"]["subPath"] == "ca.crt"
    trainer = engine == "trainer"
    amounts = [workload["spec"]["trainer"]["resourcesPerNode"]] if trainer else []
    for found in amounts or [one["spec"]["containers"][0]["resources"] for one in pods]:
        assert found["limits"] == found["requests"], "the QoS class Guaranteed"
        assert {"cpu": "16", "hugepages-2Mi": "4Gi", "ephemeral-storage": "100Gi"}.items() <= found["limits"].items()
    policy = by_kind["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods[0]["metadata"]["labels"].items(), "it is of these pods"
    assert policy["ingress"][0]["from"] == policy["egress"][0]["to"] == [{"podSelector": policy["podSelector"]}]
    if trainer:
        refused = [word for word in EVERY if word not in every(engine)]
        assert len(refused) == 5
        with pytest.raises(UserError) as caught:
            render(example("train", (*every(engine), "cluster.kubernetes.engine=trainer", *refused))[0], "kubernetes")
        assert str(caught.value).count("engine trainer can't set it") == len(refused)
        return
    spec = pods[0]["spec"]
    assert (spec["serviceAccountName"], spec["imagePullSecrets"]) == ("trainer", [{"name": "pull"}])
    assert (spec["nodeSelector"]["gpu"], spec["priorityClassName"]) == ("h200", "high")
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["containers"][0]["imagePullPolicy"] == "IfNotPresent"
    assert spec["containers"][0]["ports"] == [{"name": "metrics", "containerPort": 9400}]
    assert workload["spec"].get("runPolicy", workload["spec"])["ttlSecondsAfterFinished"] == 86400
    assert by_kind["PodMonitor"]["spec"]["podMetricsEndpoints"] == [{"port": "metrics"}]


@pytest.mark.parametrize("engine", ["jobset", "pytorchjob"])
def test_a_gang_scheduler_gets_a_group_of_all_nodes(engine: str) -> None:
    """Each pod names the group as that scheduler expects; a queue is the scheduler's own if it has queues."""
    for more, scheduler, kind, name in (
        (("scheduler_name=volcano",), "volcano", "annotations", "scheduling.k8s.io/group-name"),
        (("gang=volcano", "scheduler_name=vc2"), "vc2", "annotations", "scheduling.k8s.io/group-name"),
        (("gang=coscheduling",), "scheduler-plugins-scheduler", "labels", "scheduling.x-k8s.io/pod-group"),
    ):
        queue = ("cluster.kubernetes.queue=gpus", "cluster.kubernetes.topology_key=rack")
        documents = manifests(
            engine,
            (*SITE, *queue, "cluster.kubernetes.topology=preferred", *(f"cluster.kubernetes.{key}" for key in more)),
        )
        (group,) = (document for document in documents if document["kind"] == "PodGroup")
        volcano = kind == "annotations"
        assert group["spec"] == {"minMember": 3, **({"queue": "gpus"} if volcano else {})}
        for one in pod_templates(documents[-1]):
            assert one["metadata"][kind][name] == group["metadata"]["name"]
            assert one["spec"]["schedulerName"] == scheduler
            assert ("podAffinity" in str(one["spec"])) is volcano, "Kueue places pods by annotations"
            assert ("preferred" in str(one["spec"])) is volcano
        assert ("kueue.x-k8s.io/queue-name" in documents[-1]["metadata"]["labels"]) is not volcano


@pytest.mark.takes("builds models from a large schema")
def test_validators_reject_bad_manifests() -> None:
    document = manifests("job")[-1]
    document["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        kubernetes_validate.validate(document, SCHEMA, strict=True)
    document = manifests("trainer")[-1]
    document["spec"]["podSpecOverrides"] = [{"targetJobs": [{"name": "node"}]}]
    again = client_model(MODELS["trainer"]).from_dict(copy.deepcopy(document)).to_dict()
    assert any("podSpecOverrides" in one for one in lost(document, again))


def test_exit_codes_and_restarts() -> None:
    """13 is not retried, 75 and a lost node are not counted, and a JobSet past its deadline is not restarted."""
    jobset = manifests("jobset")[-1]["spec"]
    alone, child = manifests("job")[-1]["spec"], jobset["replicatedJobs"][0]["template"]["spec"]
    for spec, not_counted in ((alone, "Ignore"), (child, "FailJob")):
        node = spec["template"]["spec"]["containers"][0]["name"]
        assert spec["podFailurePolicy"]["rules"] == [
            {"action": "FailJob", "onExitCodes": {"containerName": node, "operator": "In", "values": [13]}},
            {"action": not_counted, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": not_counted, "onExitCodes": {"containerName": node, "operator": "In", "values": [75]}},
        ]
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
    # A Job whose limit is for all pods delays each of them by 10 s, doubled for every pod that ended.
    assert (alone["backoffLimitPerIndex"], alone["maxFailedIndexes"], "backoffLimit" in alone) == (3, 0, False)
    assert (child["backoffLimit"], "backoffLimitPerIndex" in child) == (0, False)
    for site, exceptions in ((FULL, {"DeadlineExceeded": "FailJobSet"}), (SITE, {})):
        rules = manifests("jobset", site)[-1]["spec"]["failurePolicy"]["rules"]

        def action(reason: str, message: str, rules: list[dict[str, Any]] = rules) -> str:
            """JobSet's choice: the first rule of which both match."""
            for rule in rules:
                patterns = rule.get("onJobFailureMessagePatterns", [""])
                if reason in rule["onJobFailureReasons"] and any(re.search(one, message) for one in patterns):
                    return str(rule["action"])
            return "RestartJobSet"

        ended = "Container node for pod ml/x-0 failed with exit code {} matching FailJob rule at index {}"
        evicted = "Pod ml/x-0 has condition DisruptionTarget matching FailJob rule at index 1"
        resumed = "RestartJobSetAndIgnoreMaxRestarts"
        assert action("PodFailurePolicy", ended.format(13, 0)) == "FailJobSet"
        assert [action("PodFailurePolicy", one) for one in (ended.format(75, 2), evicted)] == [resumed, resumed]
        assert action("BackoffLimitExceeded", "Job has reached the specified backoff limit") == "RestartJobSet"
        assert action("DeadlineExceeded", "") == exceptions.get("DeadlineExceeded", "RestartJobSet")
    for restarts in (0, 1, 3):  # the operator's own sum: over pods, and a limit that is reached is past
        spec = manifests("pytorchjob", (*SITE, f"cluster.max_restarts={restarts}"))[-1]["spec"]
        assert sum(one["replicas"] for one in spec["pytorchReplicaSpecs"].values()) == 3
        limit = 3 * restarts + 1 if restarts else 0
        assert spec["runPolicy"]["backoffLimit"] == limit
        job = build_job(example("train", (*SITE, f"cluster.max_restarts={restarts}"))[0])
        words = runai.submit_command(job)
        assert words[words.index("--backoff-limit") + 1] == str(limit)
        assert runai.make_payload(job)["spec"]["backoffLimit"] == limit


def test_openshifts_default_policy_admits_the_pod() -> None:
    """restricted-v2: no user of our own, no privilege, all capabilities dropped, the default seccomp profile."""
    default = {"seccompProfile": {"type": "RuntimeDefault"}}
    locked = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    for more, context, nonroot in (
        ((), {}, {"runAsNonRoot": True}),  # the Pod Security level `restricted` refuses pods without it
        (("cluster.kubernetes.user={uid: 0}",), {"runAsUser": 0}, {}),
        (("cluster.kubernetes.user={uid: 7, gid: 8}",), {"runAsUser": 7, "runAsGroup": 8}, {"runAsNonRoot": True}),
    ):
        # Not of the whole pod: the Training Operator adds a container to workers that runs as root.
        for engine in ("job", "jobset", "pytorchjob"):
            for template in pod_templates(manifests(engine, (*SITE, *more))[-1]):
                spec = template["spec"]
                assert spec["securityContext"] == {**default, **context}
                assert spec["containers"][0]["securityContext"] == {**locked, **nonroot}
                assert not {"hostNetwork", "hostIPC", "hostPID"} & set(spec)


def test_kueue_places_all_pods_of_a_run_in_one_domain() -> None:
    """Kueue finds a domain per pod set, unless they form a group, which has exactly two."""
    one_node = ("cluster.nodes=1", "cluster.network=null", "cluster.gpus_per_node=3")
    for site, engine, groups in (
        (FULL, "pytorchjob", ["nodes", "nodes"]),
        ((*FULL, *one_node), "pytorchjob", [None]),
        (FULL, "jobset", [None]),
    ):
        annotations = [one["metadata"]["annotations"] for one in pod_templates(manifests(engine, site)[-1])]
        assert [one.get("kueue.x-k8s.io/podset-group-name") for one in annotations] == groups
        topology = {one["kueue.x-k8s.io/podset-required-topology"] for one in annotations}
        assert topology == {"topology.kubernetes.io/zone"}


def test_texts_stay_texts_in_kubectls_yaml() -> None:
    """It reads YAML 1.1 with Go's numbers: what looks like a truth value or a number is quoted."""
    for text in ("Y", "1e-4", "12E5", "0o17", "08", "0_8", "-.5", "yes", "010", "-", "2026-11-28"):
        assert kubernetes.to_yaml(text) in (f"'{text}'", f'"{text}"')
    for text in ("e5", "v1e4", "1.2.3", "."):
        assert kubernetes.to_yaml(text) == text


def test_settings_invalid_for_pods_are_refused() -> None:
    def codes(*more: str) -> dict[str, str]:
        with pytest.raises(UserError) as caught:
            render(example("train", (*SITE, *more))[0], "kubernetes")
        assert all(problem.hint for problem in caught.value.problems)
        return {p.where.rpartition(" ")[2].partition("=")[0]: p.code for p in caught.value.problems}

    trainer = ("cluster.kubernetes.engine=trainer", "cluster.kubernetes.trainer_version='2.2'")
    wrong = ("cluster.memory_request=1Gi", "train.output_dir=out", "cluster.image=null", "train.save_strategy=no")
    assert codes(*wrong, *trainer, "cluster.kubernetes.priority_class=high") == {
        "cluster.memory_request": "too-little-memory",
        "train.output_dir": "relative-path",
        "train.save_strategy": "restarts-without-saves",
        "cluster.image": "no-image",
        "cluster.kubernetes.trainer_version": "too-old",
        "cluster.kubernetes.priority_class": "not-on-platform",
    }
    assert codes("cluster.cpu_limit=15500m")["cluster.cpu_limit"] == "too-few-cpus"
    assert "not-on-platform" in codes("cluster.volumes=[{host: /data, path: /data}]").values()
    assert codes("cluster.memory_limit=8996m")["cluster.memory_limit"] == "too-little-memory"
    assert "not-mounted" in codes("cluster.volumes=[]").values()


# by type: a wrong value; else two settings that don't go together
REFUSED = {
    "wrong-value": (
        "cluster.volumes=[{claim: a, path: /data}, {claim: b, path: /dev/shm/}]",
        "cluster.volumes=[{claim: a, path: '/a:b'}]",
        "cluster.volumes=[{claim: a, path: /etc/windlass/x}]",
        "cluster.volumes=[{claim: a, path: /data, sub_path: a/../../b}]",
        "cluster.kubernetes.node_selector={gpu: 'h 200'}",
        "cluster.kubernetes.tolerations=[{key: a, value: 'b c'}]",
        "cluster.kubernetes.queue=" + "a" * 60 + ".bbbb",
        "cluster.kubernetes.hugepages={4Mi: 1Gi}",
        "cluster.kubernetes.extended_resources={gpu: 1}",
        "cluster.kubernetes.gpu_resource=gpu",
    ),
    "broken-rule": (
        "cluster.volumes=[{path: /data}]",
        "cluster.volumes=[{claim: a, secret: b, path: /data}]",
        "cluster.volumes=[{claim: a, path: /data, medium: Memory}]",
        "cluster.volumes=[{claim: a, path: /data}, {claim: b, path: /data/}]",
        "cluster.kubernetes.labels={app.kubernetes.io/instance: a}",
        "cluster.kubernetes.labels={kueue.x-k8s.io/queue-name: gpus}",
        "cluster.kubernetes.annotations={k8s.v1.cni.cncf.io/networks: a}",
        "cluster.kubernetes.queue_priority=high",
        "cluster.kubernetes.topology=preferred",
        "cluster.kubernetes.pod_monitor=true",
    ),
}


def test_values_that_kubernetes_refuses_are_refused_by_their_type() -> None:
    for code, more in ((code, more) for code, rows in REFUSED.items() for more in rows):
        with refused(code, f"--override {more}") as problems:
            example("train", (*SITE, more))
        assert len(problems) == 1


def test_other_files_are_another_config_map(tmp_path: Any) -> None:
    """The first save changes the time to save: an immutable ConfigMap could not be updated."""

    def name(*overrides: str) -> str:
        text = kubernetes.render_job_yaml(build_job(plan, overrides=overrides), "job")
        return str(next(yaml.safe_load_all(text))["metadata"]["name"])

    plan = plan_of(EXAMPLES / "train.yaml", (*SITE, f"train.output_dir={tmp_path}"))
    before = name()
    assert len({before, name("lora.r=8"), name("lora.r=4")}) == 3
    run_folder.log_event(tmp_path, "save", 10, seconds=95.0, ok=True)
    assert before != name() == name()


_TEXT = st.one_of(st.text(max_size=30), st.sampled_from(["no", "1e3", "~", "a\n b\n\n", "\n\n", "\x85", "a: b # c"]))


@pytest.mark.parametrize("engine", ["pytorchjob", "trainer"])
@settings(max_examples=15, deadline=None)
@given(_TEXT, st.text("$()aX ", max_size=12))
def test_user_text_survives_rendering(engine: str, text: str, odd: str) -> None:
    plan, overrides, _ = example("train", FULL)
    job = build_job(plan, overrides=overrides)
    changed = {"annotations": {"no": text}, "affinity": {"nodeAffinity": {"a": [text]}}, "queue": None}
    section = job.cluster.kubernetes.model_copy(update={**changed, "namespace": "1e3"})
    volumes = [Volume.model_construct(claim="0x1", path=f"/{text}")]
    changed = {"kubernetes": section, "working_dir": f"/{text}", "volumes": volumes}
    cluster = job.cluster.model_copy(update=changed)
    variables = (JobVariable("A", text, text), JobVariable("ODD", odd, odd))
    job = replace(job, name="true", cluster=cluster, environment=variables, files={"run.yaml": text + "\n"})
    documents = list(yaml.safe_load_all(kubernetes.render_job_yaml(job, engine)))
    assert documents[0]["data"]["run.yaml"] == text + "\n"
    assert documents[0]["metadata"]["namespace"] == "1e3"
    workload = documents[-1]["spec"]
    if engine == "trainer":
        pod = workload["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        pod, env = pod["template"]["spec"]["template"], workload["trainer"]["env"]
    else:
        pod = pod_templates(documents[-1])[-1]
        env = pod["spec"]["containers"][0]["env"]
        assert pod["spec"]["containers"][0]["workingDir"] == f"/{text}"
    assert pod["metadata"]["annotations"]["no"] == text
    assert pod["spec"]["affinity"]["nodeAffinity"] == {"a": [text]}
    assert pod["spec"]["volumes"][-1]["persistentVolumeClaim"] == {"claimName": "0x1"}
    assert pod["spec"]["containers"][0]["volumeMounts"][-1]["mountPath"] == f"/{text}"
    values = {entry["name"]: entry["value"] for entry in env}
    assert (expanded(values["A"]), expanded(values["ODD"])) == (text, odd)


def expanded(text: str) -> str:
    """Expand variables by Kubernetes' rule (third_party/forked/golang/expansion): $$ is $, $(NAME) is another
    variable."""
    out, i = "", 0
    while i < len(text):
        if text.startswith("$$", i):
            out, i = out + "$", i + 2
        elif text.startswith("$(", i) and ")" in text[i:]:
            out, i = out + "EXPANDED", text.index(")", i) + 1
        else:
            out, i = out + text[i], i + 1
    return out
