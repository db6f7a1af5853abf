use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use crate::clock::Tick;
use crate::fleet::fixture::{member, spec};
use crate::fleet::{Engine, Fleet, ModelConfig, PodSpec, Role, Snapshot, build, join_host_port};
use crate::knobs::PdKnobs;
use crate::load::{DecodeCharge, EjectionPolicy, LoadView, PrefillCharge, Report, Verdicts};

fn first(specs: &[PodSpec]) -> Snapshot {
    build(&Snapshot::default(), specs, &mut 0)
}

fn names<'a>(pods: impl IntoIterator<Item = &'a Arc<crate::fleet::Pod>>) -> Vec<String> {
    pods.into_iter().map(|pod| pod.spec.key.to_string()).collect()
}

fn config(text: &str) -> Arc<ModelConfig> {
    Arc::new(ModelConfig::parse(text, &PdKnobs::default()).0.unwrap())
}

#[test]
fn an_incarnation_keeps_its_state_and_a_model_its_commit() {
    let mut slots = 0;
    let one = build(&Snapshot::default(), &[spec("a"), spec("b")], &mut slots);
    let two = build(&one, &[PodSpec { ready: false, ..spec("a") }, spec("b"), spec("c")], &mut slots);
    assert_eq!((one.version, two.version), (1, 2));
    let (m1, m2) = (one.model("m").unwrap(), two.model("m").unwrap());
    assert!(Arc::ptr_eq(&m1.commit, &m2.commit));
    assert!(Arc::ptr_eq(&m1.bands, &m2.bands));
    assert!(Arc::ptr_eq(&m1.rate, &m2.rate));
    assert!(Arc::ptr_eq(&m1.pairs, &m2.pairs));
    assert!(Arc::ptr_eq(&m1.pods[0].state, &m2.pods[0].state), "a changed spec keeps the state");
    assert!(Arc::ptr_eq(&m1.pods[1], &m2.pods[1]), "an unchanged pod is the same object");
    assert_eq!(m2.pods[2].state.slot, 2);
    assert!(!m2.pods[0].spec.ready);

    let restarted = build(&two, &[PodSpec { restarts: 1, ..spec("a") }], &mut slots);
    let recreated = build(&restarted, &[PodSpec { uid: Arc::from("other"), restarts: 1, ..spec("a") }], &mut slots);
    let slot = |snapshot: &Snapshot| snapshot.model("m").unwrap().pods[0].state.slot;
    assert_eq!((slot(&restarted), slot(&recreated)), (3, 4));
}

#[test]
fn health_outlives_snapshots_and_goes_with_the_incarnation() {
    let (fleet, mut slots) = (Fleet::default(), 0);
    fleet.store(build(&Snapshot::default(), &[spec("a"), spec("b"), spec("c")], &mut slots));
    let health = |fleet: &Fleet| {
        let snapshot = fleet.load();
        let model = snapshot.model("m").unwrap();
        let pods: Vec<bool> = model.pods.iter().map(|pod| pod.state.health.ejected()).collect();
        let pairs: Vec<(u32, u32)> = model.pairs.list(Tick(0)).iter().map(|pair| (pair.prefill, pair.decode)).collect();
        (pods, pairs, model.pairs.quiet(&model.settled))
    };
    {
        let snapshot = fleet.load();
        let model = snapshot.model("m").unwrap();
        let state = |id: usize| &*model.pods[id].state;
        let verdicts = Verdicts { prefill: Report::Failure, pair: Report::Failure, ..Verdicts::default() };
        let policy = EjectionPolicy { failures: 1, ..EjectionPolicy::default() };
        model.pairs.report(Some(state(0)), state(1), verdicts, &policy, Tick(0), 0);
        model.pairs.report(Some(state(0)), state(2), verdicts, &policy, Tick(0), 0);
    }
    assert_eq!(health(&fleet), (vec![true, false, false], vec![(0, 1), (0, 2)], false));
    fleet.store(build(&fleet.load(), &[PodSpec { ready: false, ..spec("a") }, spec("b")], &mut slots));
    assert_eq!(health(&fleet), (vec![true, false], vec![(0, 1)], false), "pair and pod `c` are gone");
    fleet.store(build(&fleet.load(), &[PodSpec { restarts: 1, ..spec("a") }, spec("b")], &mut slots));
    assert_eq!(health(&fleet), (vec![false, false], vec![], false), "it may have recovered");
}

#[test]
fn metric_labels_are_filled() {
    let labels = BTreeMap::from([("role-name".to_owned(), "all".to_owned())]);
    let pod = PodSpec {
        labels: Arc::new(labels),
        replica_index: Some(Arc::from("3")),
        roleset: Some(Arc::from("rs")),
        engine: Engine::Sglang,
        ..spec("a")
    };
    let snapshot = first(&[pod]);
    let labels = &snapshot.model("m").unwrap().pods[0].state.labels;
    assert_eq!(
        (labels.namespace.as_str(), labels.pod.as_str(), labels.model.as_str(), labels.engine_type.as_str()),
        ("default", "a", "m", "sglang")
    );
    assert_eq!((labels.roleset.as_str(), labels.role.as_str(), labels.role_replica_index.as_str()), ("rs", "all", "3"));
}

#[test]
fn r48_flap_with_requests_in_flight_releases_on_the_old_incarnation() {
    let mut slots = 0;
    let before = build(&Snapshot::default(), &[spec("a")], &mut slots);
    let old = Arc::clone(&before.model("m").unwrap().pods[0].state);
    let mut decodes: Vec<DecodeCharge> = (0..5).map(|_| DecodeCharge::open(&old)).collect();
    decodes.iter_mut().for_each(DecodeCharge::hand_over);
    let prefills: Vec<PrefillCharge> = (0..5).map(|_| PrefillCharge::open(&old)).collect();

    let gone = build(&before, &[], &mut slots);
    assert!(gone.model("m").is_none());
    let again = build(&gone, &[PodSpec { uid: Arc::from("new"), ..spec("a") }], &mut slots);
    let new = Arc::clone(&again.model("m").unwrap().pods[0].state);
    assert_eq!(new.load.view(), LoadView::default());
    let fresh: Vec<DecodeCharge> = (0..3).map(|_| DecodeCharge::open(&new)).collect();

    drop((decodes, prefills));
    assert_eq!(old.load.view(), LoadView::default());
    assert_eq!(new.load.view().pending, 3, "old releases must not touch the new incarnation");
    drop(fresh);
    assert_eq!(new.load.view(), LoadView::default());
}

#[test]
fn r48_the_same_incarnation_comes_back_with_the_requests_that_run_on_it() {
    let mut slots = 0;
    let before = build(&Snapshot::default(), &[spec("a"), spec("b")], &mut slots);
    let old = Arc::clone(&before.model("m").unwrap().pods[0].state);
    let mut running = DecodeCharge::open(&old);
    running.hand_over();
    // Away for more than one snapshot, without anybody who holds an old one.
    let mut now = build(&before, &[spec("b")], &mut slots);
    drop((before, old));
    for other in ["c", "d"] {
        now = build(&now, &[spec("b"), spec(other)], &mut slots);
    }
    let restarted = build(&now, &[PodSpec { restarts: 1, ..spec("a") }], &mut slots);
    assert_eq!(restarted.model("m").unwrap().pods[0].state.load.view(), LoadView::default());
    let again = build(&now, &[spec("a"), spec("b")], &mut slots);
    let new = Arc::clone(&again.model("m").unwrap().pods[0].state);
    assert_eq!((new.load.view().running, new.slot), (1, 5), "its load is what it was, all else is new");
    running.complete();
    assert_eq!((new.load.view().running, new.load.view().completed), (0, 1));

    // Once nothing runs there, nothing is remembered.
    let gone = build(&again, &[spec("b")], &mut slots);
    drop((new, again));
    let gone = build(&gone, &[spec("b"), spec("c")], &mut slots);
    let fresh = build(&gone, &[spec("a")], &mut slots);
    assert_eq!(fresh.model("m").unwrap().pods[0].state.load.view(), LoadView::default());
}

#[test]
fn r50_equal_names_in_two_namespaces_and_a_reused_address_share_nothing() {
    let in_namespace = |namespace: &str| {
        let mut pod = PodSpec { uid: Arc::from(namespace), ..spec("p0") };
        pod.key.namespace = Arc::from(namespace);
        pod
    };
    let mut slots = 0;
    let one = build(&Snapshot::default(), &[in_namespace("ns1"), in_namespace("ns2")], &mut slots);
    let model = one.model("m").unwrap();
    assert_eq!(names(&model.pods), ["ns1/p0", "ns2/p0"]);
    let _charge = DecodeCharge::open(&model.pods[0].state);
    assert_eq!(model.pods[1].state.load.view().pending, 0);

    let p9 = PodSpec { model: Arc::from("other"), ..spec("p9") };
    assert_eq!(p9.host, model.pods[0].spec.host);
    let two = build(&one, &[in_namespace("ns2"), p9], &mut slots);
    assert_eq!(names(&two.model("m").unwrap().pods), ["ns2/p0"]);
    let other = two.model("other").unwrap();
    assert_eq!(names(&other.routable), ["default/p9"]);
    assert_eq!(other.pods[0].state.load.view(), LoadView::default());
}

#[test]
fn a_copied_uid_does_not_merge_two_pods() {
    let twin = PodSpec { uid: spec("a").uid, ..spec("b") };
    let snapshot = first(&[spec("a"), twin]);
    let pods = &snapshot.model("m").unwrap().pods;
    assert_ne!(pods[0].state.slot, pods[1].state.slot);
}

#[test]
fn a_pod_that_moves_to_another_model_starts_afresh() {
    let mut slots = 0;
    let one = build(&Snapshot::default(), &[spec("a")], &mut slots);
    let two = build(&one, &[PodSpec { model: Arc::from("n"), ..spec("a") }], &mut slots);
    assert!(two.model("m").is_none());
    let pod = &two.model("n").unwrap().pods[0];
    assert_eq!((pod.state.slot, pod.state.labels.model.as_str()), (1, "n"));
}

#[test]
fn r51_port_and_labels_change_in_place_and_keep_the_load() {
    let mut slots = 0;
    let one = build(&Snapshot::default(), &[spec("a")], &mut slots);
    let _charge = DecodeCharge::open(&one.model("m").unwrap().pods[0].state);
    let changed = PodSpec { port: 9000, bootstrap_port: 9999, host: Arc::from("10.0.0.7"), ..spec("a") };
    let two = build(&one, &[changed], &mut slots);
    let pod = &two.model("m").unwrap().pods[0];
    assert_eq!((&*pod.address, pod.spec.bootstrap_port), ("10.0.0.7:9000", 9999));
    assert_eq!(pod.state.load.view().pending, 1);
}

#[test]
fn r46_terminating_pods_and_pods_without_server_or_address_take_nothing_new() {
    let snapshot = first(&[
        PodSpec { terminating: true, ..spec("a") },
        PodSpec { ready: false, ..spec("b") },
        PodSpec { host: Arc::from(""), ..spec("c") },
        PodSpec { serves_http: false, ..spec("d") },
        spec("e"),
    ]);
    let model = snapshot.model("m").unwrap();
    assert_eq!(model.pods.len(), 5);
    assert_eq!(names(&model.routable), ["default/e"]);
    assert_eq!(names(&model.standalone), ["default/e"]);
}

#[test]
fn r37_incomplete_rolesets_vanish_but_are_named() {
    let snapshot = first(&[
        member("z-p", Role::Prefill, "rs2"),
        member("z-d", Role::Decode, "rs2"),
        member("a-p", Role::Prefill, "rs1"),
        member("a-p2", Role::Prefill, "rs1"),
        PodSpec { ready: false, ..member("a-d", Role::Decode, "rs1") },
        member("b-d", Role::Decode, "rs0"),
        PodSpec { role: Role::Prefill, ..spec("stray") },
        PodSpec { roleset: Some(Arc::from("rs3")), ..spec("combined") },
    ]);
    let model = snapshot.model("m").unwrap();
    let complete: Vec<&str> = model.rolesets.iter().map(|roleset| &*roleset.name).collect();
    assert_eq!(complete, ["rs2"]);
    assert_eq!(names(&model.rolesets[0].prefill), ["default/z-p"]);
    let partial: Vec<(&str, usize, usize)> = model.partial.iter().map(|r| (&*r.name, r.prefill, r.decode)).collect();
    assert_eq!(partial, [("rs0", 0, 1), ("rs1", 2, 0)]);
    assert_eq!(names(&model.standalone), ["default/combined"]);
    assert_eq!(model.routable.len(), 7);
}

#[test]
fn replicas_are_counted_by_index_where_there_is_one() {
    let indexed = |name: &str, index: Option<&str>| PodSpec {
        replica_index: index.map(Arc::from),
        ..member(name, Role::Decode, "rs")
    };
    for (indexes, expected) in [
        (vec![None, None], 2),
        (vec![Some("0"), Some("0")], 1),
        (vec![Some("0"), Some("1"), Some("1")], 2),
        (vec![Some("0"), None], 1),
    ] {
        let mut specs = vec![member("p", Role::Prefill, "rs")];
        specs.extend(indexes.iter().enumerate().map(|(i, index)| indexed(&format!("d{i}"), *index)));
        let snapshot = first(&specs);
        let roleset = &snapshot.model("m").unwrap().rolesets[0];
        assert_eq!((roleset.prefill_replicas, roleset.decode_replicas), (1, expected), "{indexes:?}");
    }
}

#[test]
fn rolesets_of_one_name_in_two_namespaces_stay_apart() {
    let mut there = member("d", Role::Decode, "rs");
    there.key.namespace = Arc::from("elsewhere");
    let snapshot = first(&[member("p", Role::Prefill, "rs"), there]);
    let model = snapshot.model("m").unwrap();
    assert!(model.rolesets.is_empty());
    let partial: Vec<&str> = model.partial.iter().map(|roleset| &*roleset.name).collect();
    assert_eq!(partial, ["default/rs", "elsewhere/rs"]);
}

#[test]
fn r39_mixed_engines_are_seen() {
    let other = |name: &str, label: &str| PodSpec {
        engine: Engine::Other,
        labels: Arc::new(BTreeMap::from([("model.aibrix.ai/engine".to_owned(), label.to_owned())])),
        ..spec(name)
    };
    let sglang = || PodSpec { engine: Engine::Sglang, ..spec("b") };
    for (specs, engine, mixed) in [
        (vec![spec("a"), spec("b")], Some(Engine::Vllm), false),
        (vec![spec("a"), sglang()], None, true),
        (vec![spec("a"), PodSpec { ready: false, ..sglang() }], Some(Engine::Vllm), false),
        (vec![PodSpec { ready: false, ..spec("a") }], None, false),
        (vec![other("a", "xllm"), other("b", "xllm")], Some(Engine::Other), false),
        (vec![other("a", "xllm"), other("b", "xdit")], None, true),
    ] {
        let snapshot = first(&specs);
        let model = snapshot.model("m").unwrap();
        assert_eq!((model.engine, model.engines_mixed), (engine, mixed), "{specs:?}");
    }
}

#[test]
fn the_model_config_is_that_of_the_lowest_key_that_stays() {
    let pd = config(r#"{"profiles": {"default": {"routingStrategy": "pd"}}}"#);
    let pd_with_range = config(
        r#"{"profiles": {"default": {"routingStrategy": "pd", "routingConfig": {"promptLenBucketMaxLength": 9}}}}"#,
    );
    let random = config(r#"{"profiles": {"default": {"routingStrategy": "random"}}}"#);
    let with = |name: &str, config: &Arc<ModelConfig>| PodSpec { config: Some(Arc::clone(config)), ..spec(name) };
    let specs = vec![
        with("e", &random),
        with("d", &pd_with_range),
        PodSpec { ready: false, ..with("c", &pd) },
        spec("b"),
        PodSpec { terminating: true, ..with("a", &random) },
    ];
    let snapshot = first(&specs);
    let model = snapshot.model("m").unwrap();
    assert_eq!(model.config, Some(pd));
    assert_eq!(model.config_disagreements, 2, "two say random; a range of its own is no disagreement");
    assert_eq!(model.config_pod, Some(specs[2].key.clone()));
    assert_eq!(model.config_differing, [specs[4].key.clone(), specs[0].key.clone()]);
    let many: Vec<PodSpec> =
        (0..40).map(|n| with(&format!("z{n:02}"), &random)).chain([with("c", &pd_with_range)]).collect();
    let many = first(&many);
    let many = many.model("m").unwrap();
    assert_eq!((many.config_disagreements, many.config_differing.len()), (40, 16));
    assert_eq!(&*many.config_differing[0].name, "z00");

    let leaving = first(&[PodSpec { terminating: true, ..with("a", &random) }]);
    assert_eq!(leaving.model("m").unwrap().config, Some(random));
    assert_eq!(first(&[spec("a")]).model("m").unwrap().config, None);
}

#[test]
fn r79_ipv6_addresses_get_their_brackets() {
    let snapshot = first(&[PodSpec { host: Arc::from("fd00::1"), metric_port: 9090, ..spec("a") }]);
    let pod = &snapshot.model("m").unwrap().pods[0];
    assert_eq!((&*pod.address, pod.spec.metric_address().as_str()), ("[fd00::1]:8000", "[fd00::1]:9090"));
    assert_eq!(join_host_port("[fd00::1]", 1), "[fd00::1]:1");
    assert_eq!(join_host_port("pod.local", 80), "pod.local:80");
}

fn any_spec() -> impl Strategy<Value = PodSpec> {
    (0..5u8, 0..2u8, 0..3u32, 0..3u8, 0..3u8, any::<[bool; 3]>()).prop_map(
        |(name, model, restarts, role, roleset, b)| PodSpec {
            model: Arc::from(format!("m{model}")),
            restarts,
            role: [Role::Prefill, Role::Decode, Role::Other][usize::from(role)],
            roleset: (roleset > 0).then(|| Arc::from(format!("rs{roleset}"))),
            ready: b[0],
            terminating: b[1],
            serves_http: b[2],
            ..spec(&format!("p{name}"))
        },
    )
}

proptest! {
    #[test]
    fn snapshots_are_ordered_consistent_and_never_reuse_a_slot(
        rounds in proptest::collection::vec(proptest::collection::vec(any_spec(), 0..12), 1..6)
    ) {
        let mut slots = 0;
        let mut snapshot = Snapshot::default();
        for specs in rounds {
            let fresh_from = slots;
            let known: std::collections::HashSet<u32> = snapshot.pods().map(|pod| pod.state.slot).collect();
            let next = build(&snapshot, &specs, &mut slots);
            let reversed_order = {
                let distinct: BTreeMap<_, _> = specs.iter().rev().map(|spec| (spec.key.clone(), spec.clone())).collect();
                let mut shuffled: Vec<PodSpec> = distinct.into_values().collect();
                shuffled.reverse();
                build(&snapshot, &shuffled, &mut fresh_from.clone())
            };
            prop_assert_eq!(next.models.len(), reversed_order.models.len());
            for (name, model) in &next.models {
                prop_assert!(model.pods.is_sorted_by(|a, b| a.spec.key < b.spec.key));
                prop_assert!(model.rolesets.is_sorted_by(|a, b| a.name < b.name));
                prop_assert_eq!(names(&model.routable), names(&reversed_order.models[name].routable));
                for pod in &model.pods {
                    prop_assert!(known.contains(&pod.state.slot) || pod.state.slot >= fresh_from);
                    prop_assert!(pod.state.slot < slots);
                }
                for roleset in &model.rolesets {
                    prop_assert!(roleset.prefill_replicas > 0 && roleset.decode_replicas > 0);
                    prop_assert!(roleset.prefill.iter().chain(&roleset.decode).all(|pod| pod.spec.routable()));
                }
                prop_assert!(model.standalone.iter().all(|pod| pod.spec.role == Role::Other));
            }
            snapshot = next;
        }
    }
}
