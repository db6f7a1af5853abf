//! Data-parallel endpoints of a pod, and whose restarts are an engine's.

use std::sync::Arc;

use crate::discovery::{PodReader, Reading, read_documents};
use crate::fleet::{AdapterSpec, Role, Snapshot, build, build_all};
use crate::knobs::PdKnobs;

fn reading(text: &str) -> Reading {
    let documents = read_documents(text);
    assert_eq!(documents.broken, Vec::new(), "{text}");
    PodReader::new(Arc::new(PdKnobs::default())).read(&documents.pods[0])
}

fn pod(labels: &str, annotations: &str, spec: &str, statuses: &str) -> Reading {
    reading(&format!(
        "metadata:\n  name: p\n  uid: u\n  labels: {{model.aibrix.ai/name: m, {labels}}}\n  annotations: {{{annotations}}}\n\
         spec: {spec}\nstatus: {{podIP: 10.0.0.1, containerStatuses: {statuses}}}"
    ))
}

fn sized(labels: &str, size: &str) -> Reading {
    pod(labels, "", &format!("{{containers: [{{name: e, env: [{{name: data-parallel-size, value: {size}}}]}}]}}"), "[]")
}

#[test]
fn the_size_makes_endpoints() {
    for (size, ranks, problems) in [
        ("'2'", 2, 0),
        ("2", 2, 0),
        ("'64'", 64, 0),
        ("'65'", 64, 1),
        ("'100000000000000000'", 64, 1),
        ("'1'", 1, 0),
        ("'0'", 1, 0),
        ("'-2'", 1, 1),
        ("'two'", 1, 1),
        ("'2.5'", 1, 1),
        ("''", 1, 0),
        ("null", 1, 0),
        ("[2]", 1, 0),
        ("{a: 2}", 1, 0),
    ] {
        let reading = sized("model.aibrix.ai/port: '9000'", size);
        assert_eq!(reading.problems.len(), problems, "{size}: {:?}", reading.problems);
        let specs: Vec<_> = reading.specs().collect();
        let expected: Vec<(u16, u16)> = (0..ranks).map(|rank| (rank, 9000 + rank)).collect();
        assert_eq!(specs.iter().map(|spec| (spec.rank, spec.port)).collect::<Vec<_>>(), expected, "{size}");
    }
    let last = sized("model.aibrix.ai/port: '65534'", "'4'");
    assert_eq!((last.ranks.len(), last.problems.len()), (1, 1), "ports end at 65535");
}

#[test]
fn the_first_variable_with_a_value_decides() {
    for (containers, ranks) in [
        ("[{env: [{name: data-parallel-size, value: ''}, {name: data-parallel-size, value: '3'}]}]", 3),
        ("[{env: [{name: data-parallel-size, value: x}]}, {env: [{name: data-parallel-size, value: '3'}]}]", 1),
        ("[{name: a}, {env: [{name: data-parallel-size, value: '2'}]}]", 2),
        ("[{env: [{name: DATA_PARALLEL_SIZE, value: '3'}]}]", 1),
        ("[{env: [{name: data-parallel-size, valueFrom: {fieldRef: {fieldPath: x}}}]}]", 1),
        ("null", 1),
        ("[]", 1),
    ] {
        let reading = pod("", "", &format!("{{containers: {containers}}}"), "[]");
        assert_eq!(reading.specs().count(), ranks, "{containers}");
    }
}

#[test]
fn each_rank_is_an_endpoint_of_its_own() {
    let reading = sized("model.aibrix.ai/engine: sglang, role-name: decode, roleset-name: rs", "'2'");
    let specs: Vec<_> = reading.specs().collect();
    let shown: Vec<_> = specs
        .iter()
        .map(|spec| (spec.key.to_string(), spec.uid.to_string(), spec.port, spec.metric_port, spec.bootstrap_port))
        .collect();
    assert_eq!(
        shown,
        [
            ("default/p".to_owned(), "u".to_owned(), 8000, 8000, 8998),
            ("default/p/8001".to_owned(), "u/8001".to_owned(), 8001, 8001, 8999),
        ]
    );
    assert_ne!(specs[0].id(), specs[1].id(), "replicas tell them apart");
    assert!(specs.iter().all(|spec| spec.pod() == specs[0].key && spec.role == Role::Decode));
    let own_metrics: Vec<_> = sized("model.aibrix.ai/metric-port: '8080'", "'2'").specs().collect();
    assert_eq!((own_metrics[1].metric_port, own_metrics[1].bootstrap_port), (8080, 8998));

    let snapshot = build(&Snapshot::default(), &specs, &mut 0);
    let model = snapshot.model("m").unwrap();
    let slots: Vec<u32> = model.pods.iter().map(|pod| pod.state.slot).collect();
    assert_eq!(slots, [0, 1], "loads of their own");
    assert_eq!(model.partial[0].decode, 2);
    // What is said of the pod holds for all of its ranks.
    let adapter = AdapterSpec { namespace: "default".into(), name: "lora".into(), instances: vec!["p".into()] };
    let snapshot = build_all(&Snapshot::default(), &specs, &[adapter], &mut 0);
    assert_eq!(snapshot.model("lora").unwrap().routable.len(), 2);
}

#[test]
fn pairs_are_counted_by_pods_and_a_pod_group_without_an_index_is_no_part_of_one() {
    let of = |name: &str, role: &str, more: &str| {
        let text = format!(
            "metadata: {{name: {name}, labels: {{model.aibrix.ai/name: m, role-name: {role}, roleset-name: rs{more}}}}}\n\
             spec: {{containers: [{{env: [{{name: data-parallel-size, value: '3'}}]}}]}}\nstatus: {{podIP: 10.0.0.1}}"
        );
        reading(&text).specs().collect::<Vec<_>>()
    };
    let built = |prefill: &str| {
        build(&Snapshot::default(), &[of("a", "prefill", prefill), of("b", "decode", "")].concat(), &mut 0)
    };
    let whole = built("");
    let set = &whole.model("m").unwrap().rolesets[0];
    assert_eq!((set.prefill.len(), set.prefill_replicas, set.decode.len(), set.decode_replicas), (3, 1, 3, 1));
    let odd = built(", stormservice.orchestration.aibrix.ai/pod-group-index: leader");
    let model = odd.model("m").unwrap();
    assert_eq!((model.rolesets.len(), model.routable.len()), (0, 6), "it serves what is not split");
}

#[test]
fn claims_on_the_port_of_a_rank_name_that_rank() {
    let reading = pod(
        "",
        r#"modelclaim.aibrix.ai/x: '{"model":"other","port":8001,"state":"active"}'"#,
        "{containers: [{env: [{name: data-parallel-size, value: '2'}]}]}",
        "[]",
    );
    let also = reading.specs().map(|spec| (spec.rank, spec.also.len())).collect::<Vec<_>>();
    assert_eq!(also, [(0, 0), (1, 1)]);
}

#[test]
fn only_restarts_of_the_engines_container_count() {
    let statuses =
        "[{name: engine, restartCount: 2}, {name: side, restartCount: 30}, {name: aibrix-runtime, restartCount: 500}]";
    let named = "kubectl.kubernetes.io/default-container: ";
    for (annotation, spec, expected, why) in [
        ("", "{containers: [{name: side}, {name: engine, ports: [{containerPort: 8000}]}]}", 2, "it declares the port"),
        (
            "kubectl.kubernetes.io/default-container: side",
            "{containers: [{name: side}, {name: engine, ports: [{containerPort: 8000}]}]}",
            2,
            "the port says more than the annotation",
        ),
        (&format!("{named}engine"), "{containers: [{name: side}, {name: engine}]}", 2, "the annotation"),
        (&format!("{named}gone"), "{containers: [{name: engine}, {name: side}]}", 2, "the first one"),
        ("", "{containers: [{name: aibrix-runtime}, {name: engine}, {name: side}]}", 2, "the first but the sidecar"),
        ("", "{containers: [{name: side, ports: [{containerPort: 9}]}, {name: engine}]}", 30, "the first one"),
        ("", "null", 32, "no containers are listed: all but the sidecar"),
        (&format!("{named}engine"), "null", 2, "the annotation names a status"),
    ] {
        let reading = pod("", annotation, spec, statuses);
        assert_eq!(reading.spec.unwrap().restarts, expected, "{why}: {spec}");
    }
    let alone = pod("", "", "null", "[{name: aibrix-runtime, restartCount: 5}]");
    assert_eq!(alone.spec.unwrap().restarts, 5, "whatever its name, it is the only one");
}

#[test]
fn ranks_in_containers_of_their_own_restart_by_themselves() {
    let statuses = "[{name: r0, restartCount: 1}, {name: r1, restartCount: 20}, {name: side, restartCount: 300}]";
    let size = "env: [{name: data-parallel-size, value: '2'}]";
    let restarts = |spec: &str| pod("", "", spec, statuses).specs().map(|spec| spec.restarts).collect::<Vec<_>>();
    let own = format!(
        "{{containers: [{{name: r0, {size}, ports: [{{containerPort: 8000}}]}}, {{name: r1, ports: [{{containerPort: 8001}}]}}]}}"
    );
    assert_eq!(restarts(&own), [1, 20]);
    let shared = format!("{{containers: [{{name: r0, {size}, ports: [{{containerPort: 8000}}]}}, {{name: side}}]}}");
    assert_eq!(restarts(&shared), [1, 1], "one container with all ranks");
    let silent = format!("{{containers: [{{name: r0, {size}}}, {{name: r1}}]}}");
    assert_eq!(restarts(&silent), [21, 21], "nobody declares a port");
}

#[test]
fn a_sidecars_restart_forgets_nothing() {
    let at = |engine: u32, side: u32| {
        let statuses = format!("[{{name: e, restartCount: {engine}}}, {{name: s, restartCount: {side}}}]");
        let spec = "{containers: [{name: s}, {name: e, ports: [{containerPort: 8000}]}]}";
        pod("", "", spec, &statuses).specs().collect::<Vec<_>>()
    };
    let mut slots = 0;
    let first = build(&Snapshot::default(), &at(0, 0), &mut slots);
    let slot = |snapshot: &Snapshot| snapshot.model("m").unwrap().pods[0].state.slot;
    let after_side = build(&first, &at(0, 1), &mut slots);
    let after_engine = build(&after_side, &at(1, 1), &mut slots);
    assert_eq!((slot(&first), slot(&after_side), slot(&after_engine)), (0, 0, 1));
}
