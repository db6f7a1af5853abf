//! The policies that count tokens, and what decisions tell about themselves.

use std::sync::{Arc, Barrier};

use super::super::fixtures::*;
use super::super::*;
use crate::fleet::Signals;
use crate::load::TokenCharge;

fn knobs(prefill_policy: PrefillPolicy, decode_policy: DecodePolicy) -> PdKnobs {
    PdKnobs { prefill_policy, decode_policy, ..PdKnobs::default() }
}

fn token_load() -> PdKnobs {
    knobs(PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad)
}

fn of_size(prompt_tokens: u64) -> RequestFacts<'static> {
    RequestFacts { prompt_tokens, ..request() }
}

fn place(model: &Model, request: &RequestFacts<'_>, knobs: &PdKnobs, seed: u64) -> (Decision, Charges) {
    select_and_charge(model, request, Strategy::Pd, knobs, context(&index(), seed)).unwrap()
}

#[test]
fn one_long_prompt_counts_as_much_as_many_short_ones() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    let (long, _held) = place(&model, &of_size(30_000), &token_load(), 1);
    let (busy, _) = slots(&long.target);
    let mut short = Vec::new();
    for seed in 0..8 {
        let (decision, charges) = place(&model, &of_size(100), &token_load(), seed);
        assert_ne!(slots(&decision.target).0, busy, "8 · (3500 + 100) are still less than 33,500");
        short.push(charges);
    }
    let counts = knobs(PrefillPolicy::LeastRequest, DecodePolicy::LeastRequest);
    assert_eq!(slots(&place(&model, &of_size(100), &counts, 1).0.target).0, busy, "by requests it is the idle one");
}

#[test]
fn charges_are_those_of_the_policy() {
    let model = Builder::new().rolesets(1, 1, 1).build();
    let views = || model.pods.iter().map(|pod| pod.state.load.tokens.view()).collect::<Vec<_>>();
    for (prefill, decode, expected) in [
        (PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad, (3600, 3600, 100)),
        (PrefillPolicy::HybridCacheLoad, DecodePolicy::LeastRequest, (3600, 3600, 0)),
        (PrefillPolicy::PrefixCache, DecodePolicy::TokenLoad, (0, 0, 100)),
        (PrefillPolicy::Conductor, DecodePolicy::Conductor, (0, 0, 0)),
    ] {
        let (_, charges) = place(&model, &of_size(100), &knobs(prefill, decode), 1);
        let [p, d] = views()[..] else { panic!() };
        assert_eq!((p.active, p.kv, d.decode), expected, "{prefill:?} {decode:?}");
        charges.tokens.prefill_done(NOW);
        assert_eq!((views()[0].active, views()[0].kv), (0, expected.1));
        drop(charges);
        assert!(views().iter().all(crate::load::TokenView::is_zero));
    }
    // A request for a decode pod alone is charged there, one for a combined pod is not charged.
    let unsplittable = RequestFacts { splittable: Splittable::No, ..of_size(100) };
    let (_, _charges) = place(&model, &unsplittable, &token_load(), 1);
    assert_eq!((views()[0].kv, views()[1].decode), (0, 100));
    let model = Builder::new().combined(None).build();
    let (_, _charges) = place(&model, &unsplittable, &token_load(), 1);
    assert!(model.pods[0].state.load.tokens.view().is_zero());
}

#[test]
fn token_load_decode_has_neither_fast_path_nor_cold_start() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    // By requests and by throughput the second decode pod is the one; by tokens the first.
    set(&model.pods[1], Signals { foreign_running: 100.0, generation_tps: Some(9000.0), ..fresh() });
    set(&model.pods[3], Signals { foreign_running: 0.0, generation_tps: Some(0.0), ..fresh() });
    let _long = TokenCharge::decode(&model.pods[3].state, 10_000, NOW, Duration::ZERO);
    let tokens = knobs(PrefillPolicy::LeastRequest, DecodePolicy::TokenLoad);
    let (decision, _) = place(&model, &of_size(1), &tokens, 1);
    assert_eq!((slots(&decision.target).1, decision.fast_paths.decode), (1, None));
    let (decision, _) = place(&model, &of_size(1), &knobs(PrefillPolicy::LeastRequest, DecodePolicy::LeastRequest), 1);
    assert_eq!(slots(&decision.target).1, 3);
    assert_eq!(decision.fast_paths.decode, Some(DecodeFastPath::RequestSpread));
    // Without metrics the ledger speaks for a pod; the cold-start score would be 1.
    set(&model.pods[3], Signals::unknown());
    let (decision, _) = place(&model, &of_size(1), &tokens, 1);
    assert_eq!((slots(&decision.target).1, decision.scores.cold_start), (1, false));
}

#[test]
fn output_grows_the_decode_score_while_requests_are_open() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    let earlier = Tick::from_millis(NOW.0 / 1_000_000 - 60_000);
    let _old = TokenCharge::decode(&model.pods[1].state, 1_000, earlier, Duration::ZERO);
    let _young = TokenCharge::decode(&model.pods[3].state, 2_000, NOW, Duration::ZERO);
    for pod in [1, 3] {
        set(&model.pods[pod], Signals { running: Some(1.0), generation_tps: Some(50.0), ..fresh() });
    }
    // 1000 + 60 s · 50/s = 4000 against 2000.
    let grown = knobs(PrefillPolicy::LeastRequest, DecodePolicy::TokenLoad);
    let (decision, _) = place(&model, &of_size(1), &grown, 1);
    assert_eq!((slots(&decision.target).1, decision.scores.decode), (3, Some(2000.0)));
    let (decision, _) = place(&model, &of_size(1), &PdKnobs { decode_output_growth: false, ..grown }, 1);
    assert_eq!((slots(&decision.target).1, decision.scores.decode), (1, Some(1000.0)));
}

#[test]
fn hybrid_lets_the_cache_decide_between_idle_pods_and_the_load_between_busy_ones() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    let index = index();
    let hashes: Vec<u64> = (1..=10).collect();
    let update = crate::prefix::PrefixUpdate {
        model: model.name.clone(),
        hashes: hashes.as_slice().into(),
        pod: Arc::clone(&model.pods[0].state),
    };
    index.offer(update);
    index.drain(NOW);
    let hybrid = knobs(PrefillPolicy::HybridCacheLoad, DecodePolicy::LeastRequest);
    let pick = |knobs: &PdKnobs| {
        let facts = RequestFacts { hashes: &hashes, ..of_size(1_000) };
        let decision = select(&model, &facts, Strategy::Pd, knobs, context(&index, 1)).unwrap();
        (slots(&decision.target).0, decision.scores.prefill, decision.tokens.prefill)
    };
    // Idle: discount 0.5 against 1. The match also lowers the charge to the fixed cost.
    assert_eq!(pick(&hybrid), (Some(0), Some(0.5), Some(3_500)));
    let charge = |pod: usize, tokens| TokenCharge::prefill(&model.pods[pod].state, tokens, NOW, Duration::ZERO);
    let _neighbour = charge(2, 1_000);
    let held = charge(0, 1_999);
    assert_eq!(pick(&hybrid).0, Some(0), "less than twice the neighbour's load");
    drop(held);
    let _held = charge(0, 2_001);
    assert_eq!(pick(&hybrid), (Some(2), Some(1_300.0), Some(4_500)));
    // A match below the threshold is none, in the score and in the charge.
    let gated = PdKnobs { min_match_pct: 100, ..hybrid.clone() };
    assert_eq!(pick(&gated).0, Some(2));
    let sure = PdKnobs { hybrid_cache_load_factor: 1.0, ..hybrid };
    assert_eq!(pick(&sure).0, Some(0), "a factor of 1 makes a full match free");
}

/// R60 for the policies that count tokens: equal requests at a barrier end even.
#[test]
fn r60_equal_requests_spread_evenly_by_tokens() {
    for round in 0..50u64 {
        let model = Builder::new().rolesets(8, 1, 1).build();
        let prefill = if round % 2 == 0 { PrefillPolicy::TokenLoad } else { PrefillPolicy::HybridCacheLoad };
        let (knobs, barrier) = (knobs(prefill, DecodePolicy::TokenLoad), Barrier::new(64));
        let held: Vec<Charges> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..64)
                .map(|thread| {
                    let (model, knobs, barrier) = (&model, &knobs, &barrier);
                    scope.spawn(move || {
                        barrier.wait();
                        place(model, &of_size(500), knobs, round * 64 + thread).1
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for pod in &model.pods {
            let (load, tokens) = (pod.state.load.view(), pod.state.load.tokens.view());
            assert_eq!(load.in_flight(), 8, "round {round}");
            let expected = if tokens.decode == 0 { (8 * 4_000, 0) } else { (0, 8 * 500) };
            assert_eq!((tokens.active, tokens.decode), expected, "round {round}");
        }
        drop(held);
    }
}

/// R42: a pod whose blocks no decode pod fetched gets no new work while others are free.
#[test]
fn r42_prefills_avoid_a_pod_full_of_stranded_blocks() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    let ledger = Arc::new(crate::load::Ledger::new());
    let lease = NOW.plus(Duration::from_secs(30));
    for seed in 0..20 {
        let (decision, mut charges) = place(&model, &of_size(2_000), &token_load(), seed);
        ledger.watch("r", &mut charges.tokens);
        charges.tokens.prefill_done(NOW);
        if slots(&decision.target).0 == Some(0) {
            charges.tokens.strand(lease, NOW);
        }
    }
    let stranded = model.pods[0].state.load.tokens.view();
    assert!(stranded.stranded >= 5_500 && stranded.kv == stranded.stranded && stranded.active == 0);
    for seed in 0..20 {
        assert_eq!(slots(&place(&model, &of_size(2_000), &token_load(), seed).0.target).0, Some(2));
    }
    ledger.sweep(lease);
    assert!(model.pods[0].state.load.tokens.view().is_zero());
}

/// R43: a signal that never comes leaves every policy with what is known, and with the same answer each time.
#[test]
fn r43_policies_stay_deterministic_without_their_signal() {
    let model = Builder::new().rolesets(4, 1, 1).build();
    for pod in &model.pods {
        set(pod, Signals { running: Some(3.0), kv_usage: Some(0.5), ..fresh() });
    }
    let _busy: Vec<_> = [1, 3, 5].map(|pod| crate::load::DecodeCharge::open(&model.pods[pod].state)).into();
    let _tokens: Vec<_> =
        [1, 3, 5].map(|pod| TokenCharge::decode(&model.pods[pod].state, 10, NOW, Duration::ZERO)).into();
    for decode in DecodePolicy::ALL {
        for seed in 0..20 {
            let policies = knobs(PrefillPolicy::LeastRequest, decode);
            let (decision, _) = place(&model, &of_size(1), &policies, seed);
            // To `conductor` a batch of one is like none: all four are equal, and the seed decides.
            let expected: &[u32] = if decode == DecodePolicy::Conductor { &[1, 3, 5, 7] } else { &[7] };
            assert!(expected.contains(&slots(&decision.target).1), "{decode:?}");
            let again = place(&model, &of_size(1), &policies, seed).0;
            assert_eq!(slots(&again.target), slots(&decision.target));
            let missing: Vec<_> = decision.missing.names().collect();
            let wanted: &[&str] =
                if decode == DecodePolicy::LeastRequest { &[] } else { &["avg_generation_throughput_toks_per_s"] };
            assert_eq!(missing, wanted, "{decode:?}");
        }
    }
}

#[test]
fn a_decision_tells_who_was_considered_and_why() {
    let model = Builder::new().rolesets(3, 1, 1).build();
    set(&model.pods[1], Signals { generation_tps: Some(100.0), ..fresh() });
    let _held = crate::load::PrefillCharge::open(&model.pods[0].state);
    let (decision, _) = place(&model, &of_size(1), &PdKnobs::default(), 1);
    let explanation = &decision.explanation;
    assert_eq!((explanation.prefills.len(), explanation.decodes.len()), (3, 3));
    let [best, second, worst] = &explanation.prefills[..] else { panic!() };
    assert!(best.score == second.score && second.score < worst.score);
    assert_eq!((worst.slot, worst.count, worst.fate), (0, 1.0, Fate::Scored));
    assert_eq!(best.terms, Terms::Prefill { match_pct: 0, active_tokens: 0, kv_tokens: 0, mean_prefill_seconds: None });
    let warm = explanation.decodes.iter().find(|one| one.slot == 1).unwrap();
    assert_eq!(warm.metrics_age, Some(Duration::ZERO));
    assert!(matches!(warm.terms, Terms::Decode { throughput: Some(100.0), cold_start: false, .. }));
    let cold = explanation.decodes.iter().find(|one| one.slot == 3).unwrap();
    assert!(matches!(cold.terms, Terms::Decode { cold_start: true, .. }) && cold.metrics_age.is_none());
    assert_eq!(explanation.maxima.0, 11.0);
    assert_eq!(explanation.ties.prefill, 1);

    // Step 1 leaves all but one out; they are shown all the same.
    let _more: Vec<_> = (0..17).map(|_| crate::load::PrefillCharge::open(&model.pods[0].state)).collect();
    let _other = crate::load::PrefillCharge::open(&model.pods[2].state);
    let (decision, _) = place(&model, &of_size(1), &PdKnobs::default(), 1);
    let fates: Vec<Fate> = decision.explanation.prefills.iter().map(|one| one.fate).collect();
    assert_eq!(fates, [Fate::Scored, Fate::LeftOut, Fate::LeftOut]);
    assert_eq!(decision.steps(), "prefill_spread");
}

#[test]
fn a_large_fleet_is_described_by_its_best() {
    let model = Builder::new().roleset("a", 100, 100).build();
    let _held: Vec<_> = model.pods.iter().skip(7).map(|pod| crate::load::DecodeCharge::open(&pod.state)).collect();
    let _prefills: Vec<_> = model.pods.iter().skip(7).map(|pod| crate::load::PrefillCharge::open(&pod.state)).collect();
    let (decision, _) = place(&model, &of_size(1), &PdKnobs::default(), 1);
    let explanation = &decision.explanation;
    assert_eq!((explanation.prefills.len(), explanation.decodes.len()), (DESCRIBED, DESCRIBED));
    let best: Vec<u32> = explanation.prefills.iter().take(7).map(|one| one.slot).collect();
    assert_eq!(best, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(explanation.ties.prefill, 7);
}

#[test]
fn summaries_are_short_lines_of_ascii() {
    let model = Builder::new().rolesets(2, 1, 1).build();
    let (decision, _) = place(&model, &of_size(1), &PdKnobs::default(), 1);
    let record = |outcome| DecisionRecord {
        at: NOW,
        request_id: "r".to_owned(),
        model: "mö".into(),
        snapshot_version: 4,
        profile: None,
        length: PromptLength::Unknown,
        prompt_tokens: 1,
        conflicts: 0,
        blind: false,
        outcome,
    };
    let summary = record(Ok(decision)).summary();
    assert!(
        summary
            .starts_with("snapshot=4; conflicts=0; strategy=pd; policies=prefix_cache/load_balancing; prefill=ns/pod-")
    );
    assert!(summary.ends_with("candidates=2/2; steps=none; tied=2"), "{summary}");
    assert!(summary.is_ascii() && summary.len() < 400, "{summary}");
    assert_eq!(record(Err(RoutingError::NoPods)).summary(), "snapshot=4; conflicts=0");
}
