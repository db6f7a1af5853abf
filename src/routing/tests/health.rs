//! Ejected pods and pairs: who is kept away from, who may try, and that nobody is ever left without a target.

use std::sync::Barrier;

use super::super::fixtures::*;
use super::super::*;
use crate::fleet::{PodState, Role};
use crate::knobs::STRATEGIES;
use crate::load::{DecodeCharge, EjectionPolicy, PrefillCharge, Report, Verdicts};

/// 5 failures, 10 s.
const POLICY: EjectionPolicy =
    EjectionPolicy { failures: 5, base: Duration::from_secs(10), max: Duration::from_mins(5) };
/// Ejects at once.
const ONE: EjectionPolicy = EjectionPolicy { failures: 1, ..POLICY };

/// A fleet whose clock the test moves.
struct Rig {
    model: Model,
    index: PrefixIndex,
    knobs: PdKnobs,
    now: Tick,
    requests: u64,
}

impl Rig {
    fn new(builder: Builder) -> Rig {
        Rig { model: builder.build(), index: index(), knobs: PdKnobs::default(), now: NOW, requests: 0 }
    }

    fn wait(&mut self, seconds: u64) {
        self.now = self.now.plus(Duration::from_secs(seconds));
    }

    fn try_route(&mut self, facts: &RequestFacts<'_>, strategy: Strategy) -> Result<(Decision, Charges), RoutingError> {
        self.requests += 1;
        let context = Context { now: self.now, ..context(&self.index, self.requests) };
        select_and_charge(&self.model, facts, strategy, &self.knobs, context)
    }

    fn route(&mut self) -> (Decision, Charges) {
        self.try_route(&request(), Strategy::Pd).unwrap()
    }

    fn pod(&self, slot: u32) -> &PodState {
        &self.model.pods[slot as usize].state
    }

    fn report(&self, (prefill, decode): (Option<u32>, u32), verdicts: Verdicts, policy: &EjectionPolicy) {
        let prefill = prefill.map(|slot| self.pod(slot));
        self.model.pairs.report(prefill, self.pod(decode), verdicts, policy, self.now, 0);
    }

    fn eject_pod(&self, slot: u32) {
        self.report((None, slot), Verdicts { decode: Report::Failure, ..Verdicts::default() }, &ONE);
    }

    fn eject_pair(&self, prefill: u32, decode: u32) {
        self.report((Some(prefill), decode), Verdicts { pair: Report::Failure, ..Verdicts::default() }, &ONE);
    }

    /// Sends so many requests one after the other; `outcome` judges the pods of each. Returns where they went.
    fn send(&mut self, count: usize, outcome: impl Fn((Option<u32>, u32)) -> Verdicts) -> Vec<(Option<u32>, u32)> {
        (0..count)
            .map(|_| {
                let (decision, _charges) = self.route();
                let pods = slots(&decision.target);
                self.report(pods, outcome(pods), &POLICY);
                pods
            })
            .collect()
    }
}

fn well() -> Verdicts {
    Verdicts { prefill: Report::Success, decode: Report::Success, pair: Report::Success }
}

fn times(sent: &[(Option<u32>, u32)], pods: (u32, u32)) -> usize {
    sent.iter().filter(|sent| **sent == (Some(pods.0), pods.1)).count()
}

/// R52: the way from pod 0 to pod 2 is broken, and both work with others.
#[test]
fn r52_a_pair_that_always_fails_is_left_out_and_nobody_else() {
    let mut rig = Rig::new(Builder::new().roleset("a", 2, 2));
    let broken = |pods| match pods {
        (Some(0), 2) => Verdicts { pair: Report::Failure, ..Verdicts::default() },
        _ => well(),
    };
    let sent = rig.send(400, broken);
    assert_eq!(times(&sent, (0, 2)), 5, "as many as it takes, and no more");
    for pair in [(0, 3), (1, 2), (1, 3)] {
        assert!(times(&sent, pair) > 60, "{pair:?} goes on: {}", times(&sent, pair));
    }
    // One probe, which fails.
    rig.wait(10);
    assert_eq!(times(&rig.send(400, broken), (0, 2)), 1);
    rig.wait(19);
    assert_eq!(times(&rig.send(400, broken), (0, 2)), 0, "the second time is twice as long");
    // It works again: one probe, and then it is as good as any.
    rig.wait(1);
    assert!(times(&rig.send(400, |_| well()), (0, 2)) > 60);
    assert_eq!(rig.model.pairs.ejected(), 0);
    assert!(rig.model.pairs.quiet(&rig.model.settled), "and nobody looks any more");
}

/// R36: the prefill pod of roleset `a` is dead; its decode pod is well, and gets nothing through it.
#[test]
fn r36_a_dead_prefill_pod_is_left_out_and_comes_back() {
    let mut rig = Rig::new(Builder::new().rolesets(2, 1, 1));
    let dead = |pods| match pods {
        (Some(0), _) => Verdicts { prefill: Report::Failure, ..Verdicts::default() },
        _ => well(),
    };
    let sent = rig.send(200, dead);
    assert_eq!(times(&sent, (0, 1)), 5);
    assert_eq!(times(&sent, (2, 3)), 195);
    rig.wait(10);
    assert_eq!(times(&rig.send(200, dead), (0, 1)), 1, "one probe, which fails");
    // It revives at once, and is back when its time is over: 20 s.
    rig.wait(19);
    assert_eq!(times(&rig.send(200, |_| well()), (0, 1)), 0);
    rig.wait(1);
    assert!(times(&rig.send(200, |_| well()), (0, 1)) > 60);
}

#[test]
fn a_probe_without_a_verdict_gives_its_try_back() {
    let mut rig = Rig::new(Builder::new().rolesets(2, 1, 1));
    rig.eject_pod(0);
    rig.eject_pair(0, 1);
    rig.wait(10);
    let probe = |rig: &mut Rig| {
        let tried: Vec<_> =
            (0..50).map(|_| rig.route()).filter(|(decision, _)| slots(&decision.target).1 == 1).collect();
        assert_eq!(tried.len(), 1, "of 50 requests at once one goes there");
        let (_, charges) = tried.into_iter().next().unwrap();
        assert!(charges.probes.prefill.is_some() && charges.probes.pair.is_some() && charges.probes.decode.is_none());
        charges
    };
    // The client of the first leaves.
    drop(probe(&mut rig));
    let second = probe(&mut rig);
    // The second says that the pod is well, and nothing about the pair.
    rig.report((Some(0), 1), Verdicts { prefill: Report::Success, ..Verdicts::default() }, &POLICY);
    drop(second);
    assert!(!rig.pod(0).health.ejected() && rig.model.pairs.ejected() == 1);
    let (third, _held) = std::iter::repeat_with(|| rig.route()).find(|(one, _)| slots(&one.target).1 == 1).unwrap();
    assert!(!third.ejections_ignored);
    assert!((0..50).all(|_| slots(&rig.route().0.target).1 == 3), "it is the pair's turn to be tried once");
}

#[test]
fn of_many_requests_at_once_one_probes() {
    for round in 0..50 {
        let mut rig = Rig::new(Builder::new().rolesets(2, 1, 1));
        rig.eject_pod(0);
        rig.wait(10);
        let barrier = Barrier::new(8);
        let (model, index, knobs, now) = (&rig.model, &rig.index, &rig.knobs, rig.now);
        let held: Vec<(Decision, Charges)> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|thread| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let context = Context { now, ..context(index, round * 100 + thread) };
                        barrier.wait();
                        select_and_charge(model, &request(), Strategy::Pd, knobs, context).unwrap()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(held.iter().all(|(decision, charges)| !charges.blind && !decision.ejections_ignored));
        let tries = held.iter().filter(|(decision, _)| slots(&decision.target).0 == Some(0)).count();
        let probes = held.iter().filter(|(_, charges)| charges.probes.any()).count();
        assert_eq!((tries, probes), (1, 1));
    }
}

#[test]
fn the_last_pair_is_never_left_out() {
    let mut rig = Rig::new(Builder::new().roleset("a", 1, 1));
    let fail = Verdicts { prefill: Report::Failure, decode: Report::Failure, pair: Report::Failure };
    assert_eq!(times(&rig.send(50, |_| fail), (0, 1)), 50);
    let (decision, charges) = rig.route();
    assert!(decision.ejections_ignored && !charges.probes.any());
    assert_eq!(decision.steps(), "ejections_ignored");
    rig.wait(60);
    let (decision, _held) = rig.route();
    assert!(!decision.ejections_ignored, "a probe");
    let (decision, _) = rig.route();
    assert!(decision.ejections_ignored, "and somebody beside it");
    rig.report((Some(0), 1), well(), &POLICY);
    assert!(!rig.route().0.ejections_ignored);

    // Each pair is ejected, no pod is.
    let mut rig = Rig::new(Builder::new().roleset("a", 1, 2));
    rig.eject_pair(0, 1);
    assert_eq!(times(&rig.send(20, |_| Verdicts::default()), (0, 2)), 20);
    rig.eject_pair(0, 2);
    let sent = rig.send(40, |_| Verdicts::default());
    assert!(times(&sent, (0, 1)) > 0 && times(&sent, (0, 2)) > 0 && rig.route().0.ejections_ignored);
}

#[test]
fn every_strategy_keeps_away() {
    for name in STRATEGIES.iter().filter(|name| **name != "pd").chain(&["least-request:1,random:2"]) {
        let strategy = Strategy::parse(name).unwrap();
        let mut builder = Builder::new();
        for _ in 0..3 {
            builder = builder.pod(Role::Other, None, Setup::default());
        }
        let mut rig = Rig::new(builder);
        rig.eject_pod(1);
        let facts = RequestFacts { affinity: Affinity { address: Some("10.0.0.1:8000"), key: None }, ..request() };
        for _ in 0..30 {
            let (decision, _) = rig.try_route(&facts, strategy).unwrap();
            assert!(slots(&decision.target).1 != 1 && !decision.ejections_ignored, "{name}");
            let ejected = decision.explanation.decodes.iter().find(|one| one.fate == Fate::Ejected);
            assert_eq!(ejected.map(|one| one.slot), Some(1), "{name}");
        }
        rig.eject_pod(0);
        rig.eject_pod(2);
        assert!(rig.try_route(&facts, strategy).unwrap().0.ejections_ignored, "{name}");
    }
}

#[test]
fn other_ways_come_before_ejected_ones() {
    let mut rig = Rig::new(Builder::new().roleset("a", 1, 2).combined(None));
    rig.eject_pod(0);
    let (decision, _) = rig.route();
    assert!(matches!(decision.target, Target::Single { reason: SingleReason::CombinedFallback, .. }));
    assert!(!decision.ejections_ignored);
    let fates: Vec<(u32, Fate)> = decision.explanation.prefills.iter().map(|one| (one.slot, one.fate)).collect();
    assert_eq!(fates, [(0, Fate::Ejected)]);
    // A decode pod that does everything needs no prefill pod.
    let facts = RequestFacts { splittable: Splittable::No, ..request() };
    rig.eject_pod(3);
    rig.eject_pod(1);
    let (decision, _) = rig.try_route(&facts, Strategy::Pd).unwrap();
    assert_eq!((slots(&decision.target), decision.ejections_ignored), ((None, 2), false));
    rig.eject_pod(2);
    assert!(rig.route().0.ejections_ignored);
}

#[test]
fn a_pair_that_may_not_be_is_shown_as_such() {
    let mut rig = Rig::new(Builder::new().roleset("a", 1, 2));
    rig.eject_pair(0, 2);
    let (decision, _) = rig.route();
    let fates: Vec<(u32, Fate)> = decision.explanation.decodes.iter().map(|one| (one.slot, one.fate)).collect();
    assert_eq!(fates, [(1, Fate::Scored), (2, Fate::Ejected)]);
    let mut rig = Rig::new(Builder::new().roleset("a", 2, 2));
    rig.eject_pair(0, 2);
    for _ in 0..40 {
        let (decision, _) = rig.route();
        let first = slots(&decision.target).0 == Some(0);
        let ejected = decision.explanation.decodes.iter().any(|one| (one.slot, one.fate) == (2, Fate::Ejected));
        assert_eq!(ejected, first);
    }
}

/// The fast paths pick one pod of a side; the other side then has a partner for it.
#[test]
fn fast_paths_do_not_run_into_a_forbidden_pair() {
    let mut rig = Rig::new(Builder::new().roleset("a", 2, 2));
    rig.eject_pair(0, 2);
    // Pod 1 is loaded, so step 1 picks pod 0; pod 3 is loaded, so step 2 would pick pod 2.
    let prefills: Vec<_> = (0..40).map(|_| PrefillCharge::open(&rig.model.pods[1].state)).collect();
    let _decodes: Vec<_> = (0..40).map(|_| DecodeCharge::open(&rig.model.pods[3].state)).collect();
    for pod in &rig.model.pods {
        set(pod, fresh());
    }
    let (decision, charges) = rig.route();
    assert!(decision.fast_paths.prefill_spread);
    assert_eq!(slots(&decision.target), (Some(0), 3));
    drop((charges, prefills));
    let (decision, _) = rig.route();
    assert_eq!(decision.fast_paths.decode, Some(DecodeFastPath::RequestSpread));
    assert_eq!(slots(&decision.target), (Some(1), 2));
}

#[test]
fn another_try_does_without_the_pod_that_failed() {
    let avoid = |slot| RequestFacts { avoid: Some(slot), ..request() };
    let mut rig = Rig::new(Builder::new().rolesets(2, 1, 1));
    for _ in 0..20 {
        assert_eq!(slots(&rig.try_route(&avoid(0), Strategy::Pd).unwrap().0.target), (Some(2), 3));
        assert_ne!(slots(&rig.try_route(&avoid(0), Strategy::LeastRequest).unwrap().0.target).1, 0);
    }
    // Ejections give way, that pod does not.
    rig.eject_pod(2);
    let (decision, _) = rig.try_route(&avoid(0), Strategy::Pd).unwrap();
    assert_eq!((slots(&decision.target), decision.ejections_ignored), ((Some(2), 3), true));
    let mut rig = Rig::new(Builder::new().roleset("a", 1, 1));
    let error = rig.try_route(&avoid(0), Strategy::Pd).unwrap_err();
    assert_eq!(error, RoutingError::NoOther { routable: 2 });
    assert!(rig.try_route(&avoid(9), Strategy::Pd).is_ok(), "a pod that is gone");
    let mut rig = Rig::new(Builder::new().pod(Role::Other, None, Setup::default()));
    let error = rig.try_route(&avoid(0), Strategy::LeastRequest).unwrap_err();
    assert_eq!(error, RoutingError::NoOther { routable: 1 });
    // What fails without it as well is no fault of the retry.
    let error = rig.try_route(&avoid(0), Strategy::Pd).unwrap_err();
    assert!(matches!(error, RoutingError::NoPrefill { .. }), "{error}");
}
