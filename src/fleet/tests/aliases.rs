//! Adapters and claims: whose pods a model has.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use crate::clock::Tick;
use crate::fleet::fixture::{member, spec};
use crate::fleet::{AdapterSpec, ClaimState, Fleet, Home, ModelConfig, PodKey, PodSpec, Role, Snapshot, build_all};
use crate::knobs::PdKnobs;
use crate::load::{DecodeCharge, EjectionPolicy, Report, Verdicts};

fn adapter(name: &str, instances: &[&str]) -> AdapterSpec {
    AdapterSpec {
        namespace: "default".into(),
        name: name.into(),
        instances: instances.iter().map(|name| Arc::from(*name)).collect(),
    }
}

fn first(specs: &[PodSpec], adapters: &[AdapterSpec]) -> Snapshot {
    build_all(&Snapshot::default(), specs, adapters, &mut 0)
}

/// Every model: whose pods it has, and which.
fn shape(snapshot: &Snapshot) -> BTreeMap<String, (Home, Vec<String>, Vec<String>)> {
    let keys = |pods: &[Arc<crate::fleet::Pod>]| pods.iter().map(|pod| pod.spec.key.to_string()).collect();
    let models = snapshot.models.values();
    models
        .map(|model| (model.name.to_string(), (model.home.clone(), keys(&model.pods), keys(&model.routable))))
        .collect()
}

fn of(model: &str, names: &[&str]) -> (Home, Vec<String>, Vec<String>) {
    let names: Vec<String> = names.iter().map(|name| format!("default/{name}")).collect();
    (Home::Of(model.into()), names.clone(), names)
}

#[test]
fn an_adapter_has_those_pods_of_its_base_model_that_are_its_instances() {
    let elsewhere = |name: &str| PodSpec {
        key: PodKey { namespace: "other".into(), name: name.into() },
        model: "n".into(),
        ..spec(name)
    };
    let specs = [spec("a"), spec("b"), spec("c"), elsewhere("a"), PodSpec { model: "n".into(), ..spec("z") }];
    let nowhere = (Home::Nowhere, vec![], vec![]);
    for (adapters, expected, problem) in [
        (vec![adapter("l", &["a", "c"])], of("m", &["a", "c"]), None),
        (vec![adapter("l", &["c", "a", "c"])], of("m", &["a", "c"]), None),
        (vec![adapter("l", &["a", "gone"])], of("m", &["a"]), None),
        (vec![adapter("l", &["z"])], of("n", &["z"]), None),
        (vec![adapter("l", &[])], nowhere.clone(), None),
        (vec![adapter("l", &["gone"])], nowhere.clone(), None),
        // Instances are in the adapter's own namespace.
        (
            vec![AdapterSpec { namespace: "other".into(), ..adapter("l", &["a", "b"]) }],
            (Home::Of("n".into()), vec!["other/a".to_owned()], vec!["other/a".to_owned()]),
            None,
        ),
        (vec![AdapterSpec { namespace: "third".into(), ..adapter("l", &["a"]) }], nowhere, None),
        // One name in two namespaces is one model, as it is for pods.
        (vec![adapter("l", &["a"]), adapter("l", &["b"])], of("m", &["a", "b"]), None),
        (vec![adapter("l", &["b", "z", "a"])], of("m", &["a", "b"]), Some("those of m count, the other 1 do not")),
        (vec![adapter("l", &["z"]), adapter("m", &["z"])], of("n", &["z"]), Some("model m has pods of its own")),
    ] {
        let snapshot = first(&specs, &adapters);
        let shape = shape(&snapshot);
        assert_eq!(shape["l"], expected, "{adapters:?}");
        assert_eq!(shape["m"].0, Home::Own);
        assert_eq!(shape["m"].1.len(), 3);
        assert_eq!(snapshot.problems.len(), usize::from(problem.is_some()), "{:?}", snapshot.problems);
        if let Some(problem) = problem {
            assert!(snapshot.problems[0].contains(problem), "{:?}", snapshot.problems);
        }
        assert_eq!(snapshot.pods().count(), 5, "each pod once");
        assert_eq!(snapshot.homes().count(), 2);
    }
    // Its pods need not be routable.
    let snapshot = first(&[PodSpec { ready: false, ..spec("a") }, spec("b")], &[adapter("l", &["a"])]);
    assert_eq!(shape(&snapshot)["l"], (Home::Of("m".into()), vec!["default/a".to_owned()], vec![]));
}

#[test]
fn what_goes_with_the_pods_is_shared_with_their_home_and_what_goes_with_the_name_is_not() {
    let pd = ModelConfig::parse(r#"{"profiles": {"default": {"routingStrategy": "pd"}}}"#, &PdKnobs::default());
    let specs = [
        PodSpec { config: Some(Arc::new(pd.0.unwrap())), ..spec("a") },
        member("p", Role::Prefill, "rs"),
        member("d", Role::Decode, "rs"),
        member("d2", Role::Decode, "rs"),
    ];
    let mut slots = 0;
    let one = build_all(&Snapshot::default(), &specs, &[adapter("l", &["p", "d"])], &mut slots);
    let (base, alias) = (one.model("m").unwrap(), one.model("l").unwrap());
    for pod in &alias.pods {
        assert!(base.pods.iter().any(|own| Arc::ptr_eq(own, pod)), "the same object");
    }
    let charge = DecodeCharge::open(&alias.rolesets[0].decode[0].state);
    assert_eq!(base.rolesets[0].decode[0].state.load.view().pending, 1, "load is seen under either name");
    drop(charge);
    assert_eq!((alias.rolesets[0].decode.len(), base.rolesets[0].decode.len()), (1, 2));
    assert!(Arc::ptr_eq(&alias.commit, &base.commit));
    assert!(Arc::ptr_eq(&alias.peers, &base.peers));
    assert!(Arc::ptr_eq(&alias.port, &base.port));
    assert!(Arc::ptr_eq(&alias.bands, &base.bands));
    assert!(Arc::ptr_eq(&alias.pairs, &base.pairs));
    assert!(!Arc::ptr_eq(&alias.rate, &base.rate), "a limit counts the requests of one name");
    // The profiles are the base model's, though the pod that carries them is no instance; who disagrees counts once.
    assert_eq!(alias.config, base.config);
    assert!(alias.config.is_some() && alias.config_disagreements == 0);
    assert_eq!((&**alias.home_name(), &**base.home_name(), one.version), ("m", "m", alias.snapshot_version));

    let two = build_all(&one, &specs, &[adapter("l", &["p", "d2"])], &mut slots);
    let again = two.model("l").unwrap();
    assert!(Arc::ptr_eq(&again.rate, &alias.rate), "it survives");
    assert_eq!(again.rolesets[0].decode[0].spec.key.name.as_ref(), "d2");
    assert_eq!(slots, 4, "nobody became another incarnation");
}

#[test]
fn rolesets_have_the_names_that_their_home_gives_them() {
    let twin = |pod: PodSpec| PodSpec {
        key: PodKey { namespace: "other".into(), name: Arc::clone(&pod.key.name) },
        uid: format!("twin-{}", pod.uid).into(),
        ..pod
    };
    let (p, d) = (member("p", Role::Prefill, "rs"), member("d", Role::Decode, "rs"));
    let snapshot = first(&[p.clone(), d.clone(), twin(p), twin(d)], &[adapter("l", &["p", "d"])]);
    let names: Vec<&str> = snapshot.model("l").unwrap().rolesets.iter().map(|set| &*set.name).collect();
    assert_eq!(names, ["default/rs"], "as the plans and metrics of the base model call it");
}

#[test]
fn pairs_of_pods_that_no_adapter_has_are_not_forgotten() {
    let fleet = Fleet::default();
    let specs = [spec("a"), spec("b"), spec("c")];
    let adapters = [adapter("l", &["c"]), adapter("k", &[])];
    fleet.store(first(&specs, &adapters));
    let snapshot = fleet.load();
    let model = snapshot.model("m").unwrap();
    let verdicts = Verdicts { pair: Report::Failure, ..Verdicts::default() };
    let policy = EjectionPolicy { failures: 1, ..EjectionPolicy::default() };
    model.pairs.report(Some(&model.pods[0].state), &model.pods[1].state, verdicts, &policy, Tick(0), 0);
    fleet.store(build_all(&snapshot, &specs, &adapters, &mut 3));
    assert_eq!(fleet.load().model("m").unwrap().pairs.list(Tick(0)).len(), 1);
}

#[test]
fn a_name_that_changes_from_alias_to_model_and_back_keeps_nothing_of_the_others() {
    let mut slots = 0;
    let own = PodSpec { model: "l".into(), ..spec("x") };
    let one = build_all(&Snapshot::default(), &[spec("a")], &[adapter("l", &["a"])], &mut slots);
    let two = build_all(&one, &[spec("a"), own], &[adapter("l", &["a"])], &mut slots);
    let (base, model) = (two.model("m").unwrap(), two.model("l").unwrap());
    assert_eq!((&model.home, two.problems.len()), (&Home::Own, 1));
    assert!(!Arc::ptr_eq(&model.port, &base.port) && !Arc::ptr_eq(&model.commit, &base.commit));
    assert!(Arc::ptr_eq(&model.port, &model.pods[0].state.port), "its pods tell its own port");
    let three = build_all(&two, &[spec("a")], &[adapter("l", &["a"])], &mut slots);
    let alias = three.model("l").unwrap();
    assert!(alias.is_alias() && Arc::ptr_eq(&alias.port, &base.port));
    assert_eq!(three.problems, Vec::<String>::new());
}

#[test]
fn further_names_of_an_engine_are_aliases() {
    let also =
        |name: &str, more: &[&str]| PodSpec { also: more.iter().map(|name| Arc::from(*name)).collect(), ..spec(name) };
    let snapshot = first(&[also("a", &["l", "k"]), also("b", &["l", "m"]), spec("c")], &[adapter("k", &["c"])]);
    let shape = shape(&snapshot);
    assert_eq!((&shape["l"], &shape["k"]), (&of("m", &["a", "b"]), &of("m", &["a", "c"])));
    assert_eq!(snapshot.problems.len(), 1, "b claims its own model's name: {:?}", snapshot.problems);
}

#[test]
fn the_most_hopeful_claim_says_why_a_model_is_not_up() {
    use ClaimState::{Activating, Active, Failed, Sleeping};
    for (claims, expected) in [
        (vec![], None),
        (vec![Failed], Some(Failed)),
        (vec![Failed, Sleeping], Some(Sleeping)),
        (vec![Sleeping, Activating, Failed], Some(Activating)),
        (vec![Active], None),
        (vec![Active, Sleeping], Some(Sleeping)),
    ] {
        let claimed = |(index, claim): (usize, &ClaimState)| PodSpec {
            port: 0,
            claim: Some(*claim),
            ..spec(&format!("c{index}"))
        };
        let mut specs: Vec<PodSpec> = claims.iter().enumerate().map(claimed).collect();
        specs.push(PodSpec { ready: false, ..spec("own") });
        assert_eq!(first(&specs, &[]).model("m").unwrap().claim, expected, "{claims:?}");
        for spec in &mut specs {
            spec.terminating = true;
        }
        assert_eq!(first(&specs, &[]).model("m").unwrap().claim, None, "who goes away keeps no promise");
        specs.push(spec("ready"));
        assert_eq!(first(&specs, &[]).model("m").unwrap().claim, None, "it is up");
    }
}

#[derive(Clone, Debug)]
enum Event {
    Pod(u8, u8),
    NoPod(u8),
    Adapter(u8, Vec<u8>),
    NoAdapter(u8),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..5u8, 0..3u8).prop_map(|(pod, model)| Event::Pod(pod, model)),
        (0..5u8).prop_map(Event::NoPod),
        (0..4u8, proptest::collection::vec(0..6u8, 0..4)).prop_map(|(name, pods)| Event::Adapter(name, pods)),
        (0..4u8).prop_map(Event::NoAdapter),
    ]
}

proptest! {
    /// Whatever came first, the end is the same; loads are one and the same under every name; no pod counts twice.
    #[test]
    fn any_order_of_events_ends_in_the_same_snapshot(events in proptest::collection::vec(any_event(), 1..40)) {
        let (mut pods, mut adapters) = (BTreeMap::new(), BTreeMap::new());
        let (mut snapshot, mut slots) = (Snapshot::default(), 0);
        for event in events {
            match event {
                // Model 2 has the name of adapter 2.
                Event::Pod(pod, model) => {
                    pods.insert(pod, PodSpec { model: format!("m{model}").into(), ..spec(&format!("p{pod}")) });
                }
                Event::NoPod(pod) => { pods.remove(&pod); }
                Event::Adapter(name, instances) => {
                    let instances: Vec<String> = instances.iter().map(|pod| format!("p{pod}")).collect();
                    let instances: Vec<&str> = instances.iter().map(String::as_str).collect();
                    let model = if name == 2 { "m2".to_owned() } else { format!("l{name}") };
                    adapters.insert(name, adapter(&model, &instances));
                }
                Event::NoAdapter(name) => { adapters.remove(&name); }
            }
            let specs: Vec<PodSpec> = pods.values().cloned().collect();
            let declared: Vec<AdapterSpec> = adapters.values().cloned().collect();
            snapshot = build_all(&snapshot, &specs, &declared, &mut slots);
            let charges: Vec<DecodeCharge> = snapshot.pods().map(|pod| DecodeCharge::open(&pod.state)).collect();
            prop_assert_eq!(charges.len(), specs.len(), "each pod has one home");
            for model in snapshot.models.values() {
                let home = snapshot.home(model.home_name());
                prop_assert!(model.home == Home::Nowhere || home.is_some());
                prop_assert_eq!(model.home == Home::Nowhere, model.pods.is_empty());
                for pod in &model.pods {
                    prop_assert!(home.is_some_and(|home| home.pods.iter().any(|own| Arc::ptr_eq(own, pod))));
                    prop_assert_eq!(pod.state.load.view().pending, 1, "charged once, whatever its names");
                    prop_assert!(Arc::ptr_eq(&pod.state.port, &model.port));
                }
            }
            let mut reversed = (specs.clone(), declared.clone());
            reversed.0.reverse();
            reversed.1.reverse();
            let from_scratch = first(&reversed.0, &reversed.1);
            prop_assert_eq!(shape(&snapshot), shape(&from_scratch));
            prop_assert_eq!(&snapshot.problems, &from_scratch.problems);
        }
    }
}
