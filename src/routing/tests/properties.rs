//! What holds for every fleet, every load and every signal.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::strategy::Strategy as Generator;

use super::super::fixtures::*;
use super::super::*;
use crate::fleet::{Role, Roleset, Signals};
use crate::knobs::STRATEGIES;
use crate::load::{DecodeCharge, EjectionPolicy, PrefillCharge, Report, TokenCharge, TokenView, Verdicts};
use crate::prefix::PrefixUpdate;

fn wild() -> impl Generator<Value = f64> {
    prop_oneof![
        Just(0.0),
        Just(-1.0),
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::NEG_INFINITY),
        Just(f64::MAX),
        Just(f64::MIN_POSITIVE),
        0.0f64..100.0,
        0.0f64..1.0,
    ]
}

pub(in super::super) fn signals() -> impl Generator<Value = Signals> {
    let maybe = || proptest::option::of(wild());
    let known = (maybe(), maybe(), maybe(), maybe(), maybe(), maybe(), maybe(), maybe());
    (proptest::option::of(Just(NOW)), known, wild()).prop_map(|(at, known, foreign_running)| {
        let (running, waiting, prealloc, kv_usage, generation_tps, drain_rate, prompt_tps, prefill_seconds_mean) =
            known;
        Signals {
            at,
            running,
            waiting,
            decode_prealloc_queue: prealloc,
            kv_usage,
            generation_tps,
            drain_rate,
            prompt_tps,
            prefill_seconds_mean,
            foreign_running,
            ..Signals::unknown()
        }
    })
}

/// Any strategy other than `pd`: one, or a list.
pub(in super::super) fn plain_strategy() -> impl Generator<Value = super::super::Strategy> {
    let member = (proptest::sample::select(&STRATEGIES[1..]), prop_oneof![Just(0u32), 1u32..5, Just(1_000_000)]);
    proptest::collection::vec(member, 1..4).prop_map(|members| {
        let text: Vec<String> = members.iter().map(|(name, weight)| format!("{name}:{weight}")).collect();
        // A list that names one twice, or none, is none.
        let first = super::super::Strategy::parse(members[0].0).unwrap();
        super::super::Strategy::parse(&text.join(",")).unwrap_or(first)
    })
}

#[derive(Clone, Debug)]
struct Load {
    signals: Signals,
    charges: usize,
    holds: usize,
}

#[derive(Clone, Debug)]
struct Scene {
    rolesets: Vec<(usize, usize)>,
    combined: usize,
    loads: Vec<Load>,
    knobs: PdKnobs,
    splittable: Splittable,
    strategy: super::super::Strategy,
    seed: u64,
}

fn scene() -> impl Generator<Value = Scene> {
    let load =
        (signals(), 0usize..40, 0usize..=10).prop_map(|(signals, charges, holds)| Load { signals, charges, holds });
    let policies =
        (proptest::sample::select(&PrefillPolicy::ALL[..]), proptest::sample::select(&DecodePolicy::ALL[..]));
    let knobs = (any::<bool>(), policies, (wild(), wild()), 0u8..=100, wild(), wild(), wild()).prop_map(
        |(bucketing, (prefill_policy, decode_policy), (kv, hybrid), gate, running, throughput, factor)| PdKnobs {
            prompt_length_bucketing: bucketing,
            prefill_policy,
            decode_policy,
            token_load_kv_weight: kv,
            hybrid_cache_load_factor: hybrid,
            min_match_pct: gate,
            decode_weight_running: running,
            decode_weight_throughput: throughput,
            standard_deviation_factor: factor,
            ..PdKnobs::default()
        },
    );
    let strategy = prop_oneof![
        6 => Just(super::super::Strategy::Pd),
        4 => plain_strategy(),
    ];
    (
        proptest::collection::vec((0usize..4, 0usize..4), 0..5),
        0usize..3,
        proptest::collection::vec(load, 40),
        knobs,
        prop_oneof![8 => Just(Splittable::Yes), 2 => Just(Splittable::No), 1 => Just(Splittable::CombinedOnly)],
        strategy,
        any::<u64>(),
    )
        .prop_map(|(rolesets, combined, loads, knobs, splittable, strategy, seed)| Scene {
            rolesets,
            combined,
            loads,
            knobs,
            splittable,
            strategy,
            seed,
        })
}

const HASHES: [u64; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

impl Scene {
    fn build(&self, index: &PrefixIndex) -> (Model, Vec<PrefillCharge>, Vec<DecodeCharge>, Vec<TokenCharge>) {
        let mut builder = Builder::new();
        for (i, (prefill, decode)) in self.rolesets.iter().enumerate() {
            builder = builder.roleset(&format!("rs-{i}"), *prefill, *decode);
        }
        for _ in 0..self.combined {
            builder = builder.combined(None);
        }
        let model = builder.build();
        let (mut prefills, mut decodes, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for (pod, load) in model.pods.iter().zip(&self.loads) {
            set(pod, load.signals.clone());
            tokens.push(TokenCharge::prefill(&pod.state, load.charges as u64 * 1000, NOW, Duration::ZERO));
            for _ in 0..load.charges {
                if pod.spec.role == Role::Prefill {
                    prefills.push(PrefillCharge::open(&pod.state));
                } else {
                    decodes.push(DecodeCharge::open(&pod.state));
                }
            }
            let hashes = HASHES[..load.holds].into();
            index.offer(PrefixUpdate { model: Arc::clone(&model.name), hashes, pod: Arc::clone(&pod.state) });
        }
        index.drain(NOW);
        (model, prefills, decodes, tokens)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn decisions_hold_what_they_promise(scene in scene()) {
        let index = index();
        let (model, _prefills, _decodes, _tokens) = scene.build(&index);
        let facts = RequestFacts { hashes: &HASHES, splittable: scene.splittable, ..request() };
        let decide = |seed| select(&model, &facts, scene.strategy, &scene.knobs, context(&index, seed));
        let decision = decide(scene.seed);

        let complete = !model.rolesets.is_empty();
        let pd = scene.strategy == super::super::Strategy::Pd;
        let possible = match scene.splittable {
            _ if !pd => !model.pods.is_empty(),
            Splittable::CombinedOnly => scene.combined > 0,
            Splittable::Yes | Splittable::No => complete || scene.combined > 0,
        };
        prop_assert_eq!(decision.is_ok(), possible, "a target exactly when there is one");

        if let Ok(decision) = &decision {
            let again = decide(scene.seed).unwrap();
            prop_assert_eq!(slots(&again.target), slots(&decision.target));
            prop_assert_eq!(again.scores, decision.scores);
            prop_assert_eq!(again.fast_paths, decision.fast_paths);

            let scores = decision.scores;
            for score in [scores.prefill, scores.decode, scores.total, Some(scores.decode_count)].into_iter().flatten() {
                prop_assert!(score.is_finite(), "{:?}", scores);
            }
            match &decision.target {
                Target::Pair { prefill, decode } => {
                    prop_assert!(pd && scene.splittable == Splittable::Yes);
                    prop_assert_eq!(&prefill.spec.roleset, &decode.spec.roleset);
                    prop_assert!(prefill.spec.roleset.is_some());
                    prop_assert_eq!((prefill.spec.role, decode.spec.role), (Role::Prefill, Role::Decode));
                    prop_assert!(scores.total.is_some());
                }
                Target::Single { pod, reason } => match reason {
                    SingleReason::Strategy => prop_assert!(!pd),
                    SingleReason::DecodeOnly => {
                        prop_assert_eq!(pod.spec.role, Role::Decode);
                        prop_assert!(scene.combined == 0 && scene.splittable == Splittable::No);
                    }
                    _ => prop_assert_eq!(pod.spec.role, Role::Other),
                },
            }
        }
    }

    /// The winner's final score is the least that any pair of best pods could have, when no fast path narrowed.
    #[test]
    fn the_winner_has_the_least_score(scene in scene()) {
        let index = index();
        let scene = Scene { strategy: super::super::Strategy::Pd, splittable: Splittable::Yes, combined: 0, ..scene };
        let (model, _prefills, _decodes, _tokens) = scene.build(&index);
        let knobs = PdKnobs {
            // Widely open, so that steps 1 and 2 let everybody pass.
            prefill_imbalance_min_spread: u64::MAX,
            decode_imbalance_min_spread: f64::MAX,
            decode_throughput_min_spread: f64::MAX,
            decode_score_ratio: f64::MAX,
            ..scene.knobs
        };
        let facts = RequestFacts { hashes: &HASHES, ..request() };
        let nobody = ejections::Exclusions::default();
        let eligible = eligibility::gather(&model, &facts, scene.strategy, &knobs, &nobody);
        let Ok(eligible) = eligible else { return Ok(()) };
        let eligibility::Pool::Pairs { prefills, decodes, .. } = &eligible.pool else { return Ok(()) };
        let matches = prefill::Matches::look_up(&model, &eligible.pool, &facts, scene.strategy, &knobs, &index);
        let question = cascade::Question {
            model: &model,
            request: &facts,
            strategy: scene.strategy,
            knobs: &knobs,
            context: context(&index, scene.seed),
            band: None,
        };
        let decision =
            cascade::decide(question, &eligible, &matches).unwrap();
        prop_assert_eq!(decision.fast_paths, FastPaths::default());

        // The same formulas without the bookkeeping: every candidate, every roleset.
        let mut rng = crate::rng::Rng::new(1);
        let counts: Vec<u64> = prefills.iter().map(|c| c.pod.state.load.view().prefills).collect();
        let ids: Vec<usize> = (0..prefills.len()).collect();
        let scoring = prefill::Scoring {
            request: &facts,
            counts: &counts,
            matches: &matches,
            knobs: &knobs,
            context: context(&index, 0),
            rolesets: model.rolesets.len(),
        };
        let scored = prefill::score(prefills, &ids, scoring, &mut rng);
        let read = decode::Facts::read_all(decodes, context(&index, 0));
        let decode_ids: Vec<usize> = (0..decodes.len()).collect();
        let decode_scored = decode::score(&read, &decode_ids, &knobs);
        for (roleset, best) in scored.best.iter().enumerate() {
            let (_, prefill_score) = best.winner().expect("no roleset loses its last prefill pod");
            for (candidate, score) in decodes.iter().zip(&decode_scored.scores) {
                if candidate.roleset == roleset {
                    let total = prefill_score / scored.max + score / decode_scored.max;
                    prop_assert!(decision.scores.total.unwrap() <= total);
                }
            }
        }
    }

    /// Charging and releasing leaves no trace, and a charge shows where the decision said.
    #[test]
    fn charges_follow_the_decision(scene in scene()) {
        let index = index();
        let (model, _prefills, _decodes, _tokens) = scene.build(&index);
        let views = || model.pods.iter().map(|pod| pod.state.load.view()).collect::<Vec<_>>();
        let before = views();
        let tokens = || model.pods.iter().map(|pod| pod.state.load.tokens.view()).collect::<Vec<_>>();
        let no_tokens = tokens();
        let facts =
            RequestFacts { hashes: &HASHES, splittable: scene.splittable, prompt_tokens: 1000, ..request() };
        let context = context(&index, scene.seed);
        let charged = select_and_charge(&model, &facts, scene.strategy, &scene.knobs, context);
        let Ok((decision, charges)) = charged else {
            prop_assert_eq!(views(), before);
            return Ok(());
        };
        prop_assert!(!charges.blind && charges.conflicts == 0);
        let (prefill, decode) = slots(&decision.target);
        prop_assert_eq!(charges.prefill.as_ref().map(|charge| charge.pod().slot), prefill);
        prop_assert_eq!(charges.decode.pod().slot, decode);
        let total = |views: &[crate::load::LoadView]| views.iter().map(crate::load::LoadView::in_flight).sum::<u64>();
        prop_assert_eq!(total(&views()), total(&before) + 1 + u64::from(prefill.is_some()));
        for ((pod, after), before) in model.pods.iter().zip(tokens()).zip(&no_tokens) {
            let on = |slot: Option<u32>| slot == Some(pod.state.slot);
            let prefill = decision.tokens.prefill.filter(|_| on(prefill)).unwrap_or(0);
            let decode = decision.tokens.decode.filter(|_| on(Some(decode))).unwrap_or(0);
            let charged = TokenView {
                active: before.active + prefill,
                kv: before.kv + prefill,
                stranded: 0,
                decode: before.decode + decode,
            };
            prop_assert_eq!(after, charged);
        }
        drop(charges);
        prop_assert_eq!(views(), before);
        prop_assert_eq!(tokens(), no_tokens);
    }

    /// Ejections take nobody's last target, a forbidden target is chosen only if all are, and an ejected pod is as good
    /// as none.
    #[test]
    fn ejections_narrow_the_choice_and_nothing_else(
        scene in scene(),
        ejected in proptest::collection::vec(0u8..4, 40),
        pairs in proptest::collection::vec((0usize..40, 0usize..40), 0..12),
    ) {
        let index = index();
        let (model, _prefills, _decodes, _tokens) = scene.build(&index);
        let facts = RequestFacts { hashes: &HASHES, splittable: scene.splittable, ..request() };
        let decide = |model: &Model| select(model, &facts, scene.strategy, &scene.knobs, context(&index, scene.seed));
        let before = decide(&model);

        let policy = EjectionPolicy { failures: 1, ..EjectionPolicy::default() };
        // 0: ejected; 1: its time is over, and a probe may try it.
        for (pod, fate) in model.pods.iter().zip(&ejected).filter(|(_, fate)| **fate < 2) {
            let since = if *fate == 0 { NOW } else { Tick(NOW.0 - 11_000_000_000) };
            let verdicts = Verdicts { decode: Report::Failure, ..Verdicts::default() };
            model.pairs.report(None, &pod.state, verdicts, &policy, since, 0);
        }
        for (prefill, decode) in &pairs {
            let (Some(prefill), Some(decode)) = (model.pods.get(*prefill), model.pods.get(*decode)) else { continue };
            let verdicts = Verdicts { pair: Report::Failure, ..Verdicts::default() };
            model.pairs.report(Some(&prefill.state), &decode.state, verdicts, &policy, NOW, 0);
        }
        let after = decide(&model);
        prop_assert_eq!(after.is_ok(), before.is_ok());
        let Ok(after) = after else {
            prop_assert_eq!(after.unwrap_err(), before.unwrap_err());
            return Ok(());
        };
        let ill = |pod: &Pod| pod.state.health.excluded(NOW);
        let forbidden = |prefill: &Pod, decode: &Pod| {
            model.pairs.get(prefill.state.slot, decode.state.slot).is_some_and(|health| health.excluded(NOW))
        };
        let usable = |target: &Target| match target {
            Target::Pair { prefill, decode } => !ill(prefill) && !ill(decode) && !forbidden(prefill, decode),
            Target::Single { pod, .. } => !ill(pod),
        };
        prop_assert!(after.ejections_ignored || usable(&after.target), "{:?}", after.target);
        let complete = model.rolesets.iter().any(|set| {
            set.prefill.iter().any(|prefill| {
                let may = |decode: &Arc<Pod>| !ill(prefill) && !ill(decode) && !forbidden(prefill, decode);
                set.decode.iter().any(may)
            })
        });
        let pd = scene.strategy == super::super::Strategy::Pd;
        let choice = match scene.splittable {
            _ if !pd => model.pods.iter().any(|pod| !ill(pod)),
            Splittable::Yes => complete || model.standalone.iter().any(|pod| !ill(pod)),
            Splittable::CombinedOnly => model.standalone.iter().any(|pod| !ill(pod)),
            Splittable::No => {
                let decodes = model.rolesets.iter().flat_map(|set| &set.decode);
                decodes.chain(&model.standalone).any(|pod| !ill(pod))
            }
        };
        prop_assert_eq!(after.ejections_ignored, !choice);

        // Without forbidden pairs: the same model without the ejected pods says the same.
        if pairs.is_empty() && !after.ejections_ignored {
            let well = |pods: &[Arc<Pod>]| pods.iter().filter(|pod| !ill(pod)).cloned().collect::<Vec<_>>();
            let sets = model.rolesets.iter().map(|set| {
                // A decode pod that does everything needs no prefill pod beside it.
                let prefill = if scene.splittable == Splittable::Yes { well(&set.prefill) } else { set.prefill.clone() };
                Roleset { prefill, decode: well(&set.decode), ..set.clone() }
            });
            let smaller = Model {
                pods: well(&model.pods),
                routable: well(&model.routable),
                standalone: well(&model.standalone),
                rolesets: sets.filter(|set| !set.prefill.is_empty() && !set.decode.is_empty()).collect(),
                pairs: Arc::default(),
                ..model.clone()
            };
            let expected = decide(&smaller).unwrap();
            prop_assert_eq!(slots(&after.target), slots(&expected.target));
            prop_assert_eq!((after.scores, after.fast_paths), (expected.scores, expected.fast_paths));
        }
    }
}

/// R38: labels flip under load, and no pair ever mixes rolesets or models.
#[test]
fn r38_pairs_share_roleset_and_model_while_labels_flip() {
    let index = index();
    let mut rng = crate::rng::Rng::new(38);
    for round in 0..400 {
        // A fresh snapshot: each pod in a random roleset with a random role.
        let mut builder = Builder::new();
        for _ in 0..8 {
            let role = if rng.below(2) == 0 { Role::Prefill } else { Role::Decode };
            let roleset = if rng.below(2) == 0 { "a" } else { "b" };
            builder = builder.pod(role, Some(roleset), Setup::default());
        }
        let model = builder.build();
        for seed in 0..50 {
            let chosen = select_and_charge(
                &model,
                &request(),
                super::super::Strategy::Pd,
                &PdKnobs::default(),
                context(&index, round * 50 + seed),
            );
            match chosen {
                Ok((decision, _)) => {
                    let Target::Pair { prefill, decode } = decision.target else { panic!("no combined pods here") };
                    assert_eq!(prefill.spec.roleset, decode.spec.roleset);
                    assert_eq!(prefill.spec.model, decode.spec.model);
                }
                Err(_) => assert!(model.rolesets.is_empty()),
            }
        }
    }
}
