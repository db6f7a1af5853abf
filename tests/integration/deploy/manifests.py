"""Renders everything under deploy/ that is for Kubernetes, checks it, and prints one JSON object.

Core objects are checked against the OpenAPI schemas of Kubernetes, strictly: an unknown field is an error. Kustomizations are
rendered here, because CI has no kustomize: only the features they use, and anything else is refused. Charts are rendered by
Helm's own engine.
"""

import copy
import hashlib
import json
import pathlib
import sys

import compose_spec
import helm_python
import kubernetes_validate
import yaml

# The oldest and the newest release that the manifests are for.
VERSIONS = ["1.29", "1.37"]
NAMESPACE = "aibrix-system"


class Strict(yaml.SafeLoader):
    """YAML as the API server reads it: a key twice is an error."""


def mapping(loader, node):
    loader.flatten_mapping(node)
    seen = {}
    for key, value in node.value:
        key = loader.construct_object(key, deep=True)
        if key in seen:
            raise ValueError(f"{key!r} twice, {node.start_mark}")
        seen[key] = loader.construct_object(value, deep=True)
    return seen


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


def documents(text):
    return [document for document in yaml.load_all(text, Loader=Strict) if document is not None]


# ---- kustomize


def only(mapping, allowed, where):
    unknown = set(mapping) - set(allowed)
    if unknown:
        raise ValueError(f"{where}: {sorted(unknown)} are not rendered here")


def kustomize(directory):
    file = directory / "kustomization.yaml"
    (kustomization,) = documents(file.read_text())
    only(kustomization, ["apiVersion", "kind", "resources", "patches", "configMapGenerator"], file)
    objects = []
    for resource in kustomization.get("resources", []):
        path = (directory / resource).resolve()
        objects += kustomize(path) if path.is_dir() else documents(path.read_text())
    for generator in kustomization.get("configMapGenerator", []):
        objects.append(config_map(generator, directory))
    for patch in kustomization.get("patches", []):
        only(patch, ["target", "patch"], file)
        only(patch["target"], ["kind", "name"], file)
        found = [o for o in objects if o["kind"] == patch["target"]["kind"] and o["metadata"]["name"] == patch["target"]["name"]]
        if len(found) != 1:
            raise ValueError(f"{file}: {patch['target']} is {len(found)} objects")
        for operation in yaml.load(patch["patch"], Loader=Strict):
            apply(found[0], operation, file)
    names = [(o["apiVersion"], o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    if len(set(names)) != len(names):
        raise ValueError(f"{file}: an object twice")
    return objects


def config_map(generator, directory):
    only(generator, ["name", "namespace", "files"], directory)
    data = {}
    for name in generator["files"]:
        if (directory / name).resolve().parent != directory.resolve():
            raise ValueError(f"{name}: kustomize reads files only from below {directory}")
        data[name] = (directory / name).read_text()
    metadata = {"name": generator["name"], "namespace": generator["namespace"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data, "generated": True}


def go_json(value):
    """As Go's encoder writes it."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def hashed(objects):
    """Gives generated objects the names that kustomize gives them, and tells those who refer to them."""
    renamed = {}
    for made in objects:
        if made.pop("generated", False):
            name = made["metadata"]["name"]
            # Kustomize takes the hash before it gives the name.
            text = go_json({"data": made["data"], "kind": "ConfigMap", "name": ""})
            digits = hashlib.sha256(text.encode()).hexdigest()[:10]
            renamed[name] = name + "-" + digits.translate(str.maketrans("013ae", "ghkmt"))
            made["metadata"]["name"] = renamed[name]
    for o in objects:
        pod = o.get("spec", {}).get("template", {}).get("spec", {})
        for volume in pod.get("volumes", []):
            source = volume.get("configMap", {})
            source["name"] = renamed.get(source["name"], source["name"]) if source else None
    return objects


def apply(target, operation, where):
    only(operation, ["op", "path", "value"], where)
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    key = last
    if isinstance(target, list):
        key = len(target) if last == "-" else int(last)
    exists = key < len(target) if isinstance(target, list) else key in target
    match operation["op"]:
        case "test" if exists and target[key] == operation["value"]:
            pass
        case "add" if isinstance(target, list):
            target.insert(key, operation["value"])
        case "add":
            target[key] = operation["value"]
        case "replace" if exists:
            target[key] = operation["value"]
        case "remove" if exists:
            del target[key]
        case _:
            raise ValueError(f"{where}: cannot {operation}")


# ---- Helm

CASES = {
    "default": {},
    "as kustomize": {"redis": {"existingSecret": "aibrix-redis"}},
    "aibrix": {
        "redis": {"enabled": False, "passwordOptional": True},
        "envoyGateway": {"enabled": False},
    },
    "tls": {"redis": {"existingSecret": "aibrix-redis"}, "tls": {"enabled": True}},
    "old tls": {"tls": {"enabled": True, "policyVersion": "v1alpha3"}},
    "numbered": {"workload": "StatefulSet", "image": {"repository": "registry.example/tandem", "tag": "1"}},
    "bare": {
        "redis": {"enabled": False, "host": "redis.example", "port": 6380, "existingSecret": "mine"},
        "envoyGateway": {"enabled": False},
        "autoscaling": {"enabled": False},
        "networkPolicy": {
            "monitoringNamespaces": [],
            "enginePodSelector": {"matchExpressions": [{"key": "model.aibrix.ai/name", "operator": "Exists"}]},
        },
        "podDisruptionBudget": {"enabled": False},
        "serviceMonitor": {"enabled": False},
        "rbac": {"create": False},
    },
    "everything set": {
        "name": "gateway",
        "appLabel": "gateway",
        "replicas": 5,
        "prefillTimeoutSeconds": 120,
        "drain": {"propagationSeconds": 20, "timeoutSeconds": 900},
        "env": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.observability:4317"},
        "extraEnv": [{"name": "AIBRIX_AUTH_BEARER_TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}}],
        "image": {"pullSecrets": [{"name": "registry"}]},
        "podLabels": {"team": "serving"},
        "podAnnotations": {"note": "1"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "priorityClassName": "system-cluster-critical",
        "serviceMonitor": {"labels": {"release": "prometheus"}},
        "networkPolicy": {"envoyNamespaces": ["edge", "inner"]},
        "envoyGateway": {"gateway": "edge", "modelsRoute": False},
    },
}

# Values that the schema has to refuse.
REFUSED = [
    {"replicas": 0},
    {"replicas": "3"},
    {"workload": "DaemonSet"},
    {"prefilTimeoutSeconds": 60},
    {"redis": {"enabeld": True}},
    {"redis": {"port": 70000}},
    {"env": {"TANDEM_MAX_STREAMS": 100}},
    {"env": {"REDIS_HOST": "elsewhere"}},
    {"name": "No_Name"},
    {"drain": {"timeoutSeconds": -1}},
    {"tls": {"policyVersion": "v1beta1"}},
]


def charts(path):
    problems, rendered = [], {}
    lint = helm_python.lint(str(path))
    problems += [f"lint: {message}" for message in lint["errors"]]
    problems += [f"lint: {message}" for message in lint["messages"] if message["severity"] > 1]
    with helm_python.Chart.load(str(path)) as chart:
        for case, values in CASES.items():
            chart.validate_schema(values)
            files = chart.render(values, name="tandem", namespace=NAMESPACE)
            rendered[case] = []
            for name, text in sorted(files.items()):
                if name.endswith((".yaml", ".yml")):
                    rendered[case] += documents(text)
                elif "{{" in text:
                    problems.append(f"{name}: not rendered")
        for values in REFUSED:
            try:
                chart.validate_schema(values)
                problems.append(f"the schema accepts {values}")
            except helm_python.HelmError:
                pass
    return rendered, problems


# ---- checks


def validate(o, version, problems, without_schema):
    where = f"{version} {o.get('kind')}/{o.get('metadata', {}).get('name')}"
    try:
        kubernetes_validate.validate(o, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        without_schema.add(f"{o['apiVersion']}/{o['kind']}")
    except kubernetes_validate.ValidationError as error:
        problems.append(f"{where}: {error}")


def compose(text):
    options = compose_spec.PyOptions()
    options.apply_merge = True
    options.from_yaml(text).validate()


def main(root):
    problems, without_schema = [], set()
    kubernetes = root / "deploy" / "kubernetes"
    rendered = {
        str(file.parent.relative_to(root)): hashed(kustomize(file.parent)) for file in sorted(kubernetes.rglob("kustomization.yaml"))
    }
    helm, wrong = charts(root / "deploy" / "helm" / "tandem")
    problems += wrong
    # Most are in several groups.
    objects = {json.dumps(o, sort_keys=True): o for group in (rendered, helm) for found in group.values() for o in found}.values()
    for version in VERSIONS:
        for o in objects:
            validate(o, version, problems, without_schema)

    # A check that accepts everything would be none.
    deployment = next(o for o in objects if o["kind"] == "Deployment")
    for change in [{"spce": {}}, {"spec": {"replicas": "3"}}]:
        broken, found = {**copy.deepcopy(deployment), **change}, []
        validate(broken, VERSIONS[-1], found, set())
        if not found:
            problems.append(f"the schema accepts {change}")

    text = (root / "docker-compose.yml").read_text()
    compose(text)
    for good, bad in [("image: redis", "imagee: redis"), ("service_healthy", "healthy"), ("aliases: [otel", "alias: [otel")]:
        try:
            compose(text.replace(good, bad, 1))
            problems.append(f"compose accepts {bad}")
        except Exception:  # noqa: BLE001 (the package raises plain exceptions)
            pass
    (composed,) = documents(text)
    json.dump(
        {"kustomize": rendered, "helm": helm, "compose": composed, "problems": problems, "without_schema": sorted(without_schema)},
        sys.stdout,
    )


main(pathlib.Path(sys.argv[1]).resolve())
