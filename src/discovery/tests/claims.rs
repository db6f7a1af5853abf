//! Claims on pods, and adapters beside them.

use std::sync::Arc;

use crate::discovery::kubernetes::{RouteCondition, RouteObject, RouteParent as Parent};
use crate::discovery::{FleetBuilder, PodFiles, PodReader, Reading, read_documents, route_table};
use crate::fleet::{ClaimState, Fleet, RouteTable};
use crate::knobs::PdKnobs;

/// A pod `p` of model `m` on port 8000 (or of none), with these claims.
fn pod(model: &str, claims: &[(&str, &str)]) -> Reading {
    let mut reader = PodReader::new(Arc::new(PdKnobs::default()));
    reader.read(&read_documents(&text(model, claims)).pods[0])
}

fn text(model: &str, claims: &[(&str, &str)]) -> String {
    let labels = if model.is_empty() { String::new() } else { format!("model.aibrix.ai/name: {model}") };
    let claims: Vec<String> =
        claims.iter().map(|(name, text)| format!("'modelclaim.aibrix.ai/{name}': '{text}'")).collect();
    format!(
        "metadata: {{name: p, uid: u, labels: {{{labels}}}, annotations: {{{}}}}}\nstatus: {{podIP: 10.0.0.1}}\n",
        claims.join(", ")
    )
}

/// Key, UID, model, port, routable, claim, further names.
type Row<'a> = (&'a str, &'a str, &'a str, u16, bool, Option<ClaimState>, Vec<&'a str>);

fn rows(reading: &Reading) -> Vec<Row<'_>> {
    reading
        .spec
        .iter()
        .chain(&reading.claims)
        .map(|spec| {
            let also = spec.also.iter().map(|name| &**name).collect();
            (&*spec.key.name, &*spec.uid, &*spec.model, spec.port, spec.routable(), spec.claim, also)
        })
        .collect()
}

#[test]
fn a_claim_on_a_port_of_its_own_is_another_engine() {
    use ClaimState::{Activating, Active, Failed, Sleeping};
    let own: Row<'_> = ("p", "u", "m", 8000, true, None, vec![]);
    for (claim, expected) in [
        (r#"{"model": "x", "port": 9001}"#, ("p:c", "u:9001", "x", 9001, true, Some(Active), vec![])),
        (
            r#"{"model": " x ", "port": 9001, "state": "active", "more": [1]}"#,
            ("p:c", "u:9001", "x", 9001, true, Some(Active), vec![]),
        ),
        (r#"{"model": "x", "port": 0}"#, ("p:c", "u:0", "x", 0, false, Some(Active), vec![])),
        (r#"{"model": "x", "port": 0, "state": ""}"#, ("p:c", "u:0", "x", 0, false, Some(Active), vec![])),
        (
            r#"{"model": "x", "port": 0, "state": "activating"}"#,
            ("p:c", "u:0", "x", 0, false, Some(Activating), vec![]),
        ),
        (r#"{"model": "x", "port": 0, "state": "sleeping"}"#, ("p:c", "u:0", "x", 0, false, Some(Sleeping), vec![])),
        // The state counts, whatever the port.
        (
            r#"{"model": "x", "port": 9001, "state": "failed"}"#,
            ("p:c", "u:9001", "x", 9001, false, Some(Failed), vec![]),
        ),
        (
            r#"{"model": "x", "port": 8000, "state": "sleeping"}"#,
            ("p:c", "u:8000", "x", 8000, false, Some(Sleeping), vec![]),
        ),
    ] {
        let reading = pod("m", &[("c", claim)]);
        assert_eq!(rows(&reading), [own.clone(), expected.clone()], "{claim}");
        assert_eq!(reading.problems, Vec::<String>::new());
        let spec = &reading.claims[0];
        assert_eq!((spec.metric_port, &*spec.host), (spec.port, "10.0.0.1"));
        // A pod whose only models are claimed ones.
        let reading = pod("", &[("c", claim)]);
        assert_eq!(rows(&reading), [expected], "{claim}");
    }
}

#[test]
fn a_claim_on_the_port_of_another_engine_is_a_further_name_of_it() {
    let (on_8000, on_9001) = (r#"{"model": "x", "port": 8000}"#, r#"{"model": "y", "port": 9001}"#);
    let again = r#"{"model": "z", "port": 9001}"#;
    let reading = pod("m", &[("a", on_8000), ("b", on_9001), ("c", again), ("d", on_8000)]);
    let engine: Row<'_> = ("p:b", "u:9001", "y", 9001, true, Some(ClaimState::Active), vec!["z"]);
    assert_eq!(rows(&reading), [("p", "u", "m", 8000, true, None, vec!["x"]), engine]);
    let reading = pod("m", &[("a", r#"{"model": "m", "port": 8000}"#)]);
    assert_eq!(rows(&reading), [("p", "u", "m", 8000, true, None, vec![])], "what is known already");
}

#[test]
fn a_claim_that_cannot_be_used_is_one_sentence() {
    for claim in [
        "",
        "x",
        "[]",
        "null",
        r#"{"model": "x"}"#,
        r#"{"port": 1}"#,
        r#"{"model": "", "port": 1}"#,
        r#"{"model": 7, "port": 1}"#,
        r#"{"model": "x", "port": "1"}"#,
        r#"{"model": "x", "port": -1}"#,
        r#"{"model": "x", "port": 65536}"#,
        r#"{"model": "x", "port": 1.5}"#,
        r#"{"model": "x", "port": 0, "state": "active"}"#,
        r#"{"model": "x", "port": 1, "state": "SLEEPING"}"#,
        r#"{"model": "x", "port": 1, "state": 3}"#,
    ] {
        for (model, specs) in [("m", 1), ("", 0)] {
            let reading = pod(model, &[("c", claim)]);
            assert_eq!(rows(&reading).len(), specs, "{claim}");
            assert_eq!(reading.problems.len(), 1, "{claim}");
            assert!(reading.problems[0].contains("pod default/p: annotation modelclaim.aibrix.ai/c is not used"));
        }
    }
    let long = format!(r#"{{"model": "{}", "port": 1}}"#, "x".repeat(513));
    assert_eq!(pod("m", &[("c", &long)]).problems.len(), 1);
    let names: Vec<String> = (0..70).map(|index| format!("c{index:02}")).collect();
    let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), r#"{"model": "x", "port": 0}"#)).collect();
    let reading = pod("m", &many);
    assert_eq!((reading.claims.len(), reading.problems.len()), (64, 1), "{:?}", reading.problems);
}

#[test]
fn a_broken_config_of_a_pod_with_nothing_but_claims_keeps_its_last_good_one() {
    let claim = r#"'modelclaim.aibrix.ai/c': '{"model": "x", "port": 1}'"#;
    let with = |config: &str| {
        let text = format!(
            "metadata: {{name: p, uid: u, annotations: {{{claim}, model.aibrix.ai/config: '{config}'}}}}\nstatus: \
             {{podIP: 10.0.0.1}}\n"
        );
        read_documents(&text).pods.remove(0)
    };
    let mut reader = PodReader::new(Arc::new(PdKnobs::default()));
    let good = reader.read(&with(r#"{"lockedRoutingStrategy": "pd"}"#)).claims;
    assert!(good[0].config.is_some());
    reader.retain(&good);
    assert_eq!(reader.read(&with(r#"{"lockedRou"#)).claims[0].config, good[0].config);
}

#[test]
fn adapters_are_read_from_files_beside_pods() {
    let text = "kind: ModelAdapter\nmetadata: {name: l, namespace: ns}\nspec: {baseModel: m}\n\
                status: {phase: Running, instances: [p, q], conditions: [{type: Ready, status: 'True'}]}\n---\n\
                kind: ModelAdapter\nmetadata: {name: k}\n---\nkind: ModelAdapter\nmetadata: {namespace: ns}\n---\n\
                kind: ModelAdapterList\nitems: [{metadata: {name: j}}]\n---\n\
                kind: List\nitems: [{kind: ModelAdapter, metadata: {name: i}}, {kind: Service, metadata: {name: s}}]\n";
    let documents = read_documents(text);
    let shown: Vec<String> = documents
        .adapters
        .iter()
        .map(|adapter| format!("{}/{} {:?}", adapter.namespace, adapter.name, adapter.instances))
        .collect();
    assert_eq!(shown, [r#"ns/l ["p", "q"]"#, "default/k []", "default/j []", "default/i []"]);
    assert_eq!((documents.pods.len(), documents.broken.len(), documents.foreign.len()), (0, 1, 1));
}

#[test]
fn an_adapter_that_is_cut_off_while_a_file_is_written_stays_for_a_look() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pods.yaml");
    let adapter = "---\nkind: ModelAdapter\nmetadata: {name: l}\nstatus: {instances: [p]}\n";
    let whole = text("m", &[]) + adapter;
    let mut files = PodFiles::new(&path, Arc::new(PdKnobs::default()));
    let instances = |files: &mut PodFiles| {
        let found = files.poll_once()?;
        Some(found.adapters.iter().map(|adapter| adapter.instances.len()).collect::<Vec<_>>())
    };
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(instances(&mut files), Some(vec![1]));
    for half in [text("m", &[]), whole.replace("[p]", "[]")] {
        std::fs::write(&path, half).unwrap();
        assert_eq!(instances(&mut files), None, "it may be the middle of a write");
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(instances(&mut files), None);
    }
    std::fs::write(&path, whole.replace("[p]", "[p, q]")).unwrap();
    assert_eq!(instances(&mut files), Some(vec![2]), "more are news at once");
    std::fs::write(&path, text("m", &[])).unwrap();
    assert_eq!((instances(&mut files), instances(&mut files)), (None, Some(vec![])), "twice the same is meant");
    std::fs::write(&path, format!("{whole}{adapter}")).unwrap();
    let found = files.poll_once().unwrap();
    assert_eq!((found.adapters.len(), found.problems.len()), (1, 1));
    assert!(found.problems[0].contains("adapter default/l is already in pods.yaml"), "{:?}", found.problems);
}

#[test]
fn the_builder_tells_problems_of_the_source_and_of_the_snapshot() {
    let builder = FleetBuilder::new(Arc::new(Fleet::default()), Vec::new());
    let pods = |model: &str| pod(model, &[]).spec.into_iter().collect::<Vec<_>>();
    let adapters = read_documents("kind: ModelAdapter\nmetadata: {name: l}\nstatus: {instances: [p]}\n").adapters;
    builder.set_problems(vec!["from the source".to_owned()]);
    assert!(builder.apply_all(pods("l"), adapters.clone()).changed);
    assert_eq!(builder.problems().texts.len(), 2, "{:?}", builder.problems());
    assert!(!builder.apply_all(pods("l"), adapters.clone()).changed);
    assert!(builder.apply_all(pods("m"), adapters).changed);
    assert_eq!(builder.problems().texts, ["from the source"]);
    assert!(builder.apply_all(pods("m"), Vec::new()).changed, "an adapter that is gone is news");
    builder.set_problems(Vec::new());
    assert_eq!(builder.problems().texts, Vec::<String>::new());

    let before = builder.fleet().load();
    let table = || RouteTable::Known([(Arc::from("m-router"), Vec::new())].into());
    builder.set_routes(table());
    let first = builder.fleet().routes();
    builder.set_routes(table());
    assert!(Arc::ptr_eq(&first, &builder.fleet().routes()) && Arc::ptr_eq(&before, &builder.fleet().load()));
}

#[test]
fn a_route_is_ready_by_what_its_gateways_say() {
    let condition = |kind: &str, status: &str| RouteCondition { kind: kind.to_owned(), status: status.to_owned() };
    let parent = |conditions: Vec<RouteCondition>| Parent { conditions };
    let route = |namespace: &str, name: &str, parents: Vec<Parent>| RouteObject {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        parents,
    };
    let good = || parent(vec![condition("ResolvedRefs", "True"), condition("Accepted", "True")]);
    let routes = [
        route("aibrix-system", "a-router", vec![good()]),
        route("elsewhere", "b-router", vec![good()]),
        route("aibrix-system", "c-router", vec![]),
        route("aibrix-system", "d-router", vec![parent(vec![condition("Accepted", "True")])]),
        route("aibrix-system", "e-router", vec![parent(vec![condition("Accepted", "Unknown")])]),
    ];
    let table = route_table(&routes);
    for (model, expected) in [
        ("a", ""),
        ("b", "b-router does not exist"),
        ("c", "has no status"),
        ("d", "condition ResolvedRefs is not True"),
        ("e", "condition Accepted is not True"),
    ] {
        let fault = table.check(model).err().map(|fault| fault.to_string()).unwrap_or_default();
        assert!(fault.contains(expected) && fault.is_empty() == expected.is_empty(), "{model}: {fault}");
    }
}

/// As from the API server: its controller still unloads it, and it takes no new requests.
#[test]
fn an_adapter_that_is_being_deleted_is_none() {
    let adapter = |deleted: &str| {
        read_documents(&format!("kind: ModelAdapter\nmetadata: {{name: l{deleted}}}\nstatus: {{instances: [p]}}\n"))
            .adapters
    };
    assert_eq!(adapter("").len(), 1);
    assert!(adapter(", deletionTimestamp: \"2026-01-01T00:00:00Z\"").is_empty());
}
