use std::sync::Arc;

use crate::discovery::{PodReader, Reading, read_documents};
use crate::fleet::{Engine, PodSpec, Role, Snapshot, build};
use crate::knobs::{KvConnector, PdKnobs};

fn reader() -> PodReader {
    PodReader::new(Arc::new(PdKnobs::default()))
}

fn readings(text: &str) -> Vec<Reading> {
    let documents = read_documents(text);
    assert_eq!(documents.broken, Vec::new(), "{text}");
    let mut reader = reader();
    documents.pods.iter().map(|manifest| reader.read(manifest)).collect()
}

/// The one pod of a manifest with these labels and these further lines.
fn pod(labels: &str, more: &str) -> (PodSpec, Vec<String>) {
    let text = format!(
        "metadata:\n  name: p\n  labels: {{model.aibrix.ai/name: m, {labels}}}\n{more}\nstatus: {{podIP: 10.0.0.1}}"
    );
    let mut all = readings(&text);
    let reading = all.remove(0);
    assert!(all.is_empty());
    (reading.spec.unwrap(), reading.problems)
}

#[test]
fn a_whole_pod() {
    let text = r#"
apiVersion: v1
kind: Pod
metadata:
  name: p
  namespace: prod
  uid: u-1
  labels:
    model.aibrix.ai/name: org/model
    model.aibrix.ai/port: "9000"
    model.aibrix.ai/metric-port: "9100"
    model.aibrix.ai/engine: sglang
    model.aibrix.ai/kv-connector-type: NIXL
    roleset-name: rs0
    role-name: decode
    stormservice.orchestration.aibrix.ai/role-replica-index: "2"
    stormservice.orchestration.aibrix.ai/pod-group-index: "0"
    extra: x
  annotations:
    model.aibrix.ai/sglang-bootstrap-port: "9998"
    model.aibrix.ai/config: '{"profiles": {"default": {"routingStrategy": "pd"}}}'
spec:
  containers: [{name: engine, image: x, env: [{name: A, value: b}]}]
status:
  phase: Running
  podIP: 10.1.2.3
  podIPs: [{ip: 10.1.2.3}]
  conditions:
  - {type: PodScheduled, status: "True"}
  - {type: Ready, status: "True", lastTransitionTime: 2026-01-01T00:00:00Z}
  containerStatuses:
  - {name: engine, restartCount: 2, ready: true}
  - {name: sidecar, restartCount: 1, ready: true}
"#;
    let reading = readings(text).remove(0);
    assert_eq!(reading.problems, Vec::<String>::new());
    let spec = reading.spec.unwrap();
    assert_eq!((spec.key.to_string().as_str(), &*spec.uid, spec.restarts), ("prod/p", "u-1", 2));
    assert_eq!((&*spec.model, &*spec.host, spec.port, spec.metric_port), ("org/model", "10.1.2.3", 9000, 9100));
    assert_eq!((spec.engine, spec.kv_connector, spec.bootstrap_port), (Engine::Sglang, Some(KvConnector::Nixl), 9998));
    assert_eq!(
        (spec.role, spec.roleset.as_deref(), spec.replica_index.as_deref()),
        (Role::Decode, Some("rs0"), Some("2"))
    );
    assert_eq!((spec.serves_http, spec.ready, spec.terminating, spec.routable()), (true, true, false, true));
    assert_eq!(spec.labels.get("extra").map(String::as_str), Some("x"));
    assert_eq!(spec.config.unwrap().profiles.len(), 1);
}

#[test]
fn defaults() {
    let (spec, problems) = pod("", "");
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!((spec.key.to_string().as_str(), &*spec.uid, spec.restarts), ("default/p", "default/p", 0));
    assert_eq!((spec.port, spec.metric_port, spec.bootstrap_port), (8000, 8000, 8998));
    assert_eq!((spec.engine, spec.kv_connector, spec.role), (Engine::Vllm, None, Role::Other));
    assert_eq!((spec.roleset, spec.replica_index, spec.config), (None, None, None));
    assert!(spec.serves_http && spec.ready && !spec.terminating);
}

#[test]
fn ports() {
    for (label, port, metric_port, problems) in [
        ("model.aibrix.ai/port: 9000", 9000, 9000, 0),
        ("model.aibrix.ai/port: '65535'", 65535, 65535, 0),
        ("model.aibrix.ai/port: '65536'", 8000, 8000, 1),
        ("model.aibrix.ai/port: '0'", 8000, 8000, 1),
        ("model.aibrix.ai/port: http", 8000, 8000, 1),
        ("model.aibrix.ai/port: 9000, model.aibrix.ai/metric-port: 9001", 9000, 9001, 0),
        ("model.aibrix.ai/port: 9000, model.aibrix.ai/metric-port: x", 9000, 9000, 1),
        ("model.aibrix.ai/port: null", 8000, 8000, 0),
    ] {
        let (spec, found) = pod(label, "");
        assert_eq!((spec.port, spec.metric_port, found.len()), (port, metric_port, problems), "{label}");
    }
    let (spec, problems) = pod("", "  annotations: {model.aibrix.ai/sglang-bootstrap-port: no}");
    assert_eq!((spec.bootstrap_port, problems.len()), (8998, 1));
}

#[test]
fn engines_and_connectors() {
    for (label, engine) in [
        ("model.aibrix.ai/engine: vllm", Engine::Vllm),
        ("model.aibrix.ai/engine: ''", Engine::Vllm),
        ("model.aibrix.ai/engine: trtllm", Engine::Trtllm),
        ("model.aibrix.ai/engine: xllm", Engine::Other),
    ] {
        assert_eq!(pod(label, "").0.engine, engine, "{label}");
    }
    let annotation = "  annotations: {model.aibrix.ai/engine: sglang}";
    assert_eq!(pod("", annotation).0.engine, Engine::Sglang);
    assert_eq!(pod("model.aibrix.ai/engine: trtllm", annotation).0.engine, Engine::Trtllm);
    for (connector, expected, problem) in [
        ("shfs", Some(KvConnector::Shfs), None),
        ("NiXl", Some(KvConnector::Nixl), None),
        ("mooncake", Some(KvConnector::Mooncake), None),
        ("carrier-pigeon", None, Some("unknown")),
        ("''", None, None),
    ] {
        let (spec, problems) = pod(&format!("model.aibrix.ai/kv-connector-type: {connector}"), "");
        assert_eq!(spec.kv_connector, expected, "{connector}");
        assert_eq!(problems.len(), usize::from(problem.is_some()), "{connector}");
        assert!(problems.iter().all(|text| text.contains(problem.unwrap())), "{problems:?}");
    }
}

#[test]
fn the_model_name_comes_from_the_label_then_the_annotation() {
    let manifest = |labels: &str, annotations: &str| {
        let text = format!("metadata:\n  name: p\n  labels: {labels}\n  annotations: {annotations}");
        readings(&text).remove(0).spec.map(|spec| spec.model.to_string())
    };
    assert_eq!(manifest("{model.aibrix.ai/name: a}", "{model.aibrix.ai/name: b}").as_deref(), Some("a"));
    assert_eq!(manifest("{x: y}", "{model.aibrix.ai/name: b}").as_deref(), Some("b"));
    assert_eq!(manifest("{model.aibrix.ai/name: ''}", "null"), None);
    assert_eq!(manifest("null", "{}"), None);
    assert_eq!(manifest("{model.aibrix.ai/name: a, ray.io/node-type: worker}", "{}"), None);
    assert_eq!(manifest("{model.aibrix.ai/name: a, ray.io/node-type: head}", "{}").as_deref(), Some("a"));
}

#[test]
fn r46_who_is_ready() {
    for (status, ready, terminating) in [
        ("{podIP: 1.1.1.1}", true, false),
        ("{podIP: 1.1.1.1, conditions: []}", true, false),
        ("{podIP: 1.1.1.1, conditions: [{type: Ready, status: 'True'}]}", true, false),
        ("{podIP: 1.1.1.1, conditions: [{type: Ready, status: 'False'}]}", false, false),
        ("{podIP: 1.1.1.1, conditions: [{type: Ready, status: Unknown}]}", false, false),
        ("{podIP: 1.1.1.1, conditions: [{type: PodScheduled, status: 'True'}]}", false, false),
        ("{podIP: 1.1.1.1, phase: Failed}", true, true),
        ("{podIP: 1.1.1.1, phase: Succeeded}", true, true),
        ("{podIP: 1.1.1.1, phase: Running}", true, false),
    ] {
        let text = format!("metadata: {{name: p, labels: {{model.aibrix.ai/name: m}}}}\nstatus: {status}");
        let spec = readings(&text).remove(0).spec.unwrap();
        assert_eq!((spec.ready, spec.terminating), (ready, terminating), "{status}");
        assert_eq!(spec.routable(), ready && !terminating, "{status}");
    }
    let (spec, _) = pod("", "  deletionTimestamp: 2026-01-01T00:00:00Z");
    assert!(spec.terminating && !spec.routable());
}

#[test]
fn workers_of_a_pod_group_serve_no_http() {
    // As the reference reads it: a number above 0 is a worker, and only "0" takes part in prefill/decode.
    for (index, serves, pd, problems) in [
        ("'0'", true, true, 0),
        ("0", true, true, 0),
        ("'1'", false, false, 0),
        ("'01'", false, false, 0),
        ("'+3'", false, false, 0),
        ("'99999999999999999999999'", false, false, 0),
        ("''", true, false, 1),
        ("'00'", true, false, 1),
        ("'-1'", true, false, 1),
        ("leader", true, false, 1),
        ("'1x'", true, false, 1),
        ("null", true, true, 0),
    ] {
        let (spec, found) = pod(&format!("stormservice.orchestration.aibrix.ai/pod-group-index: {index}"), "");
        assert_eq!((spec.serves_http, spec.pd, found.len()), (serves, pd, problems), "{index}");
    }
}

#[test]
fn a_draining_pod_is_ready_and_gets_nothing_new() {
    for (label, annotation, draining, problems) in [
        ("aibrix.ai/draining: 'true'", "{}", true, 0),
        ("aibrix.ai/draining: true", "{}", true, 0),
        ("", "{aibrix.ai/draining: 'true'}", true, 0),
        ("", "{aibrix.ai/draining: ' True '}", true, 0),
        ("aibrix.ai/draining: 'false'", "{aibrix.ai/draining: 'true'}", true, 0),
        ("aibrix.ai/draining: 'false'", "{}", false, 0),
        ("aibrix.ai/draining: ''", "{}", false, 0),
        ("", "{aibrix.ai/draining: soon}", false, 1),
        ("", "{}", false, 0),
    ] {
        let (spec, found) = pod(label, &format!("  annotations: {annotation}"));
        assert_eq!((spec.draining, found.len()), (draining, problems), "{label} {annotation}");
        assert_eq!((spec.ready, spec.reachable(), spec.routable()), (true, true, !draining), "{label} {annotation}");
    }
}

#[test]
fn the_scheme_of_an_engine() {
    for (scheme, tls, problems) in [("https", true, 0), ("HTTPS", true, 0), ("http", false, 0), ("tls", false, 1)] {
        let (spec, found) = pod("", &format!("  annotations: {{model.aibrix.ai/scheme: {scheme}}}"));
        assert_eq!((spec.tls, found.len()), (tls, problems), "{scheme}");
    }
}

#[test]
fn r79_addresses() {
    for (ip, host, problems) in [
        ("10.0.0.1", "10.0.0.1", 0),
        ("'fd00::1'", "fd00::1", 0),
        ("'[fd00::1]'", "fd00::1", 0),
        ("engine-0.engines.svc", "engine-0.engines.svc", 0),
        ("localhost", "localhost", 0),
        ("''", "", 0),
        ("10.0.0.300", "", 1),
        ("'http://10.0.0.1'", "", 1),
        ("'10.0.0.1:8000'", "", 1),
        ("'fe80::1%eth0'", "", 1),
        ("'a b'", "", 1),
        ("-x", "", 1),
    ] {
        let text = format!("metadata: {{name: p, labels: {{model.aibrix.ai/name: m}}}}\nstatus: {{podIP: {ip}}}");
        let reading = readings(&text).remove(0);
        let spec = reading.spec.unwrap();
        assert_eq!((&*spec.host, reading.problems.len()), (host, problems), "{ip}");
        assert_eq!(spec.routable(), !host.is_empty(), "{ip}");
    }
    let reading = readings("metadata: {name: p, labels: {model.aibrix.ai/name: m}}").remove(0);
    assert!(!reading.spec.unwrap().routable(), "no address, no requests");
}

#[test]
fn a_role_without_roleset_is_reported() {
    let (spec, problems) = pod("role-name: prefill", "");
    assert_eq!((spec.role, problems.len()), (Role::Prefill, 1));
    assert_eq!(pod("role-name: all", "").1.len(), 0);
}

#[test]
fn documents_lists_and_json() {
    let one = "metadata: {name: a, labels: {model.aibrix.ai/name: m}}";
    let names = |text: &str| {
        readings(text).into_iter().map(|reading| reading.spec.unwrap().key.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(&format!("---\n{one}\n--- # second\n{}\n---\n---\n", one.replace("a,", "b,"))), ["a", "b"]);
    assert_eq!(names(&format!("\u{feff}{one}\r\n---\r\n{}\r\n", one.replace("a,", "b,"))), ["a", "b"]);
    assert_eq!(names(&format!("kind: List\nitems:\n- {{kind: Pod, {one}}}\n- {{{one}}}")), ["a", "a"]);
    assert_eq!(names(&format!("kind: PodList\nitems: [{{{one}}}]")), ["a"]);
    let json = r#"{"kind": "Pod", "metadata": {"name": "a", "labels": {"model.aibrix.ai/name": "m"}}}"#;
    assert_eq!(names(json), ["a"]);
    assert_eq!(names(&format!("{json}\n{}", json.replace("\"a\"", "\"b\""))), ["a", "b"]);
    assert_eq!(
        names(&format!(r#"{{"kind": "PodList", "metadata": {{"resourceVersion": "1"}}, "items": [{json}]}}"#)),
        ["a"]
    );
    assert_eq!(names(&format!("{{{one}}}")), ["a"], "flow style is YAML, not JSON");
    assert!(names("").is_empty() && names("\n# nothing\n---\n").is_empty());
    let block =
        "metadata:\n  name: a\n  labels: {model.aibrix.ai/name: m}\n  annotations:\n    note: |\n      ---\n      x\n";
    assert_eq!(names(block), ["a"], "an indented separator is text");
}

#[test]
fn broken_documents_are_reported_one_by_one() {
    let text = "metadata: {name: a}\n---\nmetadata: {name: bad-one, labels: 7}\n---\nmetadata:\n  name: worse\n  labels: {\n---\n\
                metadata: {labels: {}}\n---\nkind: Service\nmetadata: {name: s}\n---\nmetadata: {name: z}\n";
    let documents = read_documents(text);
    assert_eq!(documents.pods.len(), 2);
    assert_eq!(documents.foreign.len(), 1);
    assert!(documents.foreign[0].contains("\"Service\""), "{:?}", documents.foreign);
    let broken: Vec<(usize, Option<&str>)> =
        documents.broken.iter().map(|error| (error.document, error.pod.as_deref())).collect();
    assert_eq!(broken, [(2, Some("bad-one")), (3, Some("worse")), (4, None)]);
    let documents = read_documents(r#"{"metadata": {"name": "j", "labels": 5}}"#);
    assert_eq!(documents.broken[0].pod.as_deref(), Some("j"));
    for (text, name) in [
        ("metadata: {name: a-1, labels: {", Some("a-1")),
        ("metadata: {\"name\": \"a.b\", labels: {", Some("a.b")),
        ("metadata: {labels: {model.aibrix.ai/name: m, rename: x, name: , ", None),
        ("name", None),
        ("name: [", None),
    ] {
        assert_eq!(read_documents(text).broken[0].pod.as_deref(), name, "{text}");
    }
}

#[test]
fn errors_do_not_quote_the_document() {
    let documents = read_documents("metadata: {name: a}\nspec: {token: hunter2, x: [}\n");
    assert!(!documents.broken.is_empty());
    assert!(documents.broken.iter().all(|error| !error.to_string().contains("hunter2")), "{documents:?}");
}

#[test]
fn r92_a_truncated_annotation_keeps_that_pods_last_good_config() {
    let manifest = |name: &str, config: &str| {
        let text = format!(
            "metadata:\n  name: {name}\n  labels: {{model.aibrix.ai/name: m}}\n  annotations: {{model.aibrix.ai/config: '{config}'}}"
        );
        read_documents(&text).pods.remove(0)
    };
    let good = r#"{"profiles": {"default": {"routingStrategy": "pd"}}}"#;
    let cut = r#"{"profiles": {"default": {"routingSt"#;
    let mut reader = reader();
    let a1 = reader.read(&manifest("a", good)).spec.unwrap();
    let b1 = reader.read(&manifest("b", good)).spec.unwrap();
    assert!(Arc::ptr_eq(a1.config.as_ref().unwrap(), b1.config.as_ref().unwrap()), "equal texts share one value");
    reader.retain(&[a1.clone(), b1.clone()]);

    let a2 = reader.read(&manifest("a", cut));
    assert_eq!(a2.spec.unwrap().config, a1.config);
    assert!(a2.config_problems[0].contains("last usable one stays"), "{:?}", a2.config_problems);
    let c = reader.read(&manifest("c", cut));
    assert_eq!(c.spec.unwrap().config, None);
    assert!(c.config_problems[0].contains("is ignored"), "{:?}", c.config_problems);

    assert_eq!(reader.read(&manifest("b", "")).spec.unwrap().config, None, "no annotation is a wish, not an accident");
    assert_eq!(reader.read(&manifest("b", cut)).spec.unwrap().config, None);
    reader.retain(&[]);
    assert_eq!(reader.read(&manifest("a", cut)).spec.unwrap().config, None, "a pod that was gone starts afresh");
}

fn with_config(name: &str, config: &str) -> crate::discovery::Manifest {
    let text = format!(
        "metadata:\n  name: {name}\n  labels: {{model.aibrix.ai/name: m}}\n  annotations: {{model.aibrix.ai/config: '{config}'}}"
    );
    read_documents(&text).pods.remove(0)
}

/// One pass over these pods: specs and problems.
fn pass(reader: &mut PodReader, pods: &[(String, &str)]) -> (Vec<PodSpec>, Vec<String>) {
    let readings: Vec<Reading> = pods.iter().map(|(name, config)| reader.read(&with_config(name, config))).collect();
    let problems = readings.iter().flat_map(|reading| reading.config_problems.clone()).collect();
    let specs: Vec<PodSpec> = readings.into_iter().filter_map(|reading| reading.spec).collect();
    reader.retain(&specs);
    (specs, problems)
}

#[test]
fn r92_a_truncated_annotation_on_one_of_8_pods_changes_nothing_but_the_list_of_problems() {
    let good = r#"{"profiles": {"default": {"routingStrategy": "pd"}}}"#;
    let pods = |broken: Option<usize>| -> Vec<(String, &str)> {
        (0..8).map(|n| (format!("p{n}"), if broken == Some(n) { &good[..30] } else { good })).collect()
    };
    for broken in 0..8 {
        let mut reader = reader();
        let (specs, problems) = pass(&mut reader, &pods(None));
        assert_eq!(problems, Vec::<String>::new());
        let before = build(&Snapshot::default(), &specs, &mut 0);
        let (specs, problems) = pass(&mut reader, &pods(Some(broken)));
        assert_eq!(problems.len(), 1, "{problems:?}");
        let after = build(&before, &specs, &mut 8);
        let (before, after) = (before.model("m").unwrap(), after.model("m").unwrap());
        assert_eq!((&before.config, after.config_disagreements), (&after.config, 0), "{broken}");
    }
}

#[test]
fn r92_a_bad_value_is_told_once_for_all_pods_and_passes() {
    let bad = r#"{"profiles": {"default": {"routingConfig": {"minMatchPct": 101}}}}"#;
    // Another text with the same bad value, one with another, and one that is not JSON.
    let ranged = r#"{"profiles": {"default": {"routingConfig": {"minMatchPct": 101, "promptLenBucketMaxLength": 9}}}}"#;
    let other = r#"{"profiles": {"default": {"routingConfig": {"minMatchPct": 102}}}}"#;
    let cut = r#"{"profiles": {"defa"#;
    let pods: Vec<(String, &str)> = [bad, bad, ranged, ranged, other, cut, cut, bad]
        .into_iter()
        .enumerate()
        .map(|(n, text)| (format!("p{n}"), text))
        .collect();
    let mut reader = reader();
    let (_, problems) = pass(&mut reader, &pods);
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems[0].contains("minMatchPct is 101") && problems[0].ends_with("(first seen on pod default/p0)"));
    assert!(
        problems[1].contains("102") && problems[1].ends_with("p4)") && problems[2].ends_with("p5)"),
        "{problems:?}"
    );
    // The next look says the same, also when the pod that had it first is gone: nothing new to log.
    assert_eq!(pass(&mut reader, &pods).1, problems);
    let mut moved = pass(&mut reader, &pods[1..]).1;
    moved.sort();
    let mut sorted = problems.clone();
    sorted.sort();
    assert_eq!(moved, sorted);
    // Once mended it is forgotten.
    assert_eq!(pass(&mut reader, &pods[4..5]).1, problems[1..2]);
    assert!(pass(&mut reader, &pods).1[0].ends_with("p0)"));
}

#[test]
fn the_examples_are_what_they_say() {
    let snapshot = |text: &str| {
        let readings = readings(text);
        assert!(readings.iter().all(|reading| reading.problems.is_empty() && reading.config_problems.is_empty()));
        let specs: Vec<PodSpec> = readings.into_iter().filter_map(|reading| reading.spec).collect();
        build(&Snapshot::default(), &specs, &mut 0)
    };
    let pairs = snapshot(include_str!("../../../examples/pods-2p2d.yaml"));
    let model = pairs.model("demo").unwrap();
    let rolesets: Vec<(&str, usize, usize)> =
        model.rolesets.iter().map(|roleset| (&*roleset.name, roleset.prefill.len(), roleset.decode.len())).collect();
    assert_eq!(rolesets, [("rs0", 1, 1), ("rs1", 1, 1)]);
    assert_eq!((model.engine, model.config_disagreements), (Some(Engine::Vllm), 0));
    let profile = Arc::clone(model.config.as_ref().unwrap().profile(None).unwrap());
    assert_eq!(profile.routing_strategy.as_deref(), Some("pd"));

    let buckets = snapshot(include_str!("../../../examples/pods-buckets.yaml"));
    let model = buckets.model("demo").unwrap();
    assert_eq!((model.rolesets.len(), model.standalone.len(), model.config_disagreements), (1, 1, 0));
    let of = |pod: &crate::fleet::Pod| Arc::clone(pod.spec.config.as_ref().unwrap().profile(None).unwrap());
    let (prefill, combined) = (of(&model.rolesets[0].prefill[0]), of(&model.standalone[0]));
    assert_eq!((prefill.bucket.max, prefill.combined), (Some(2048), false));
    assert_eq!((combined.bucket.max, combined.combined), (None, true));
    assert!(prefill.knobs.prompt_length_bucketing);
}
