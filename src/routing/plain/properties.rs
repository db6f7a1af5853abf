//! What holds for every strategy, every load and every signal.

use proptest::prelude::{Just, ProptestConfig, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::super::fixtures::*;
use super::super::tests::properties::{plain_strategy, signals};
use super::super::*;
use super::view::View;
use super::*;
use crate::fleet::{Role, Signals};
use crate::load::DecodeCharge;

fn pods() -> impl proptest::strategy::Strategy<Value = Vec<(Signals, usize, u8)>> {
    proptest::collection::vec((signals(), 0usize..20, 0u8..=100), 1..10)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Scores are finite, the winner has the least of them, of several the fewest requests, and it all repeats.
    #[test]
    fn the_winner_has_the_least_score(
        pods in pods(),
        strategy in plain_strategy(),
        key in proptest::option::of("[a-z]{0,4}"),
        address in proptest::option::of(0u8..12),
        user in proptest::option::of(0.0f64..1e12),
        factor in prop_oneof![Just(f64::NAN), Just(f64::INFINITY), 0.0f64..4.0],
        seed in any::<u64>(),
    ) {
        let builder = pods.iter().fold(Builder::new(), |all, _| all.pod(Role::Other, None, Setup::default()));
        let model = builder.build();
        let mut held = Vec::new();
        for (pod, (signals, charges, _)) in model.pods.iter().zip(&pods) {
            set(pod, signals.clone());
            held.extend((0..*charges).map(|_| DecodeCharge::open(&pod.state)));
        }
        let matches = Matches::known(pods.iter().map(|(_, _, percent)| *percent).collect());
        let knobs = PdKnobs { standard_deviation_factor: factor, ..PdKnobs::default() };
        let address = address.map(|host| format!("10.0.0.{host}:8000"));
        let affinity = Affinity { address: address.as_deref(), key: key.as_deref().map(str::as_bytes) };
        let user = user.map(|tokens| UserTokens { tokens, bounds: Some((tokens / 2.0, tokens * 3.0)) });
        let request = Request { model: "m", affinity, user, matches: &matches, knobs: &knobs };
        let index = index();
        let context = context(&index, seed);
        let run = || pick(&model.routable, strategy, request, context, &mut Rng::new(seed)).expect("there is a pod");
        let chosen = run();
        prop_assert_eq!((run().index, run().scores), (chosen.index, chosen.scores));
        prop_assert_eq!(chosen.pod.state.slot, chosen.index as u32);

        let mut views: Vec<View<'_>> = model.pods.iter().map(|pod| View::read(pod, context)).collect();
        let kept = gate::keep(views.iter().map(|view| view.in_flight), knobs.strategies.gate);
        prop_assert_eq!(chosen.gated, kept.is_some() && pods.len() > 1);
        let left = matches.only(kept.as_deref().unwrap_or(&(0..pods.len()).collect::<Vec<_>>()));
        if let Some(kept) = &kept {
            prop_assert!(kept.contains(&chosen.index), "the gate leaves the least busy over");
            views = kept.iter().map(|id| views[*id].clone()).collect();
        }
        let request = Request { matches: &left, ..request };
        let mut missing = MissingSignals::default();
        let scored = scores(strategy, &views, request, context, &mut Rng::new(seed), &mut missing);
        prop_assert_eq!(scored.len(), views.len());
        prop_assert!(scored.iter().all(|score| score.is_finite()), "{:?}", scored);
        let by_chance = matches!(strategy, Strategy::PowerOfTwo) || strategy == Strategy::VtcBasic && user.is_none();
        if let Some(score) = chosen.scores.decode.filter(|_| !by_chance) {
            let fewest = scored.iter().zip(&views).filter(|(other, _)| **other == score).map(|(_, view)| view.in_flight);
            prop_assert!(scored.iter().all(|other| score <= *other), "{} of {:?}", score, scored);
            if strategy != Strategy::LoadBalance {
                prop_assert_eq!(fewest.fold(f64::INFINITY, f64::min), chosen.scores.decode_count);
            }
        }
    }
}
