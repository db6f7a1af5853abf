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
        let request = Request { affinity, matches: &matches, knobs: &knobs };
        let index = index();
        let context = context(&index, seed);
        let run = || pick(&model.routable, strategy, request, context, &mut Rng::new(seed)).expect("there is a pod");
        let chosen = run();
        prop_assert_eq!((run().index, run().scores), (chosen.index, chosen.scores));
        prop_assert_eq!(chosen.pod.state.slot, chosen.index as u32);

        let views: Vec<View<'_>> = model.pods.iter().map(|pod| View::read(pod, context)).collect();
        let mut missing = MissingSignals::default();
        let rng = &mut Rng::new(seed);
        let scored = match strategy {
            Strategy::Weighted(weights) => weighted::scores(weights, &views, request, rng, &mut missing),
            single => scores(single, &views, request, rng, &mut missing),
        };
        prop_assert_eq!(scored.len(), views.len());
        prop_assert!(scored.iter().all(|score| score.is_finite()), "{:?}", scored);
        if let Some(score) = chosen.scores.decode.filter(|_| strategy != Strategy::PowerOfTwo) {
            let fewest = scored.iter().zip(&views).filter(|(other, _)| **other == score).map(|(_, view)| view.in_flight);
            prop_assert!(scored.iter().all(|other| score <= *other), "{} of {:?}", score, scored);
            prop_assert_eq!(fewest.fold(f64::INFINITY, f64::min), chosen.scores.decode_count);
        }
    }
}
