//! Step 2: the decode pods are unevenly loaded.

use super::Facts;
use crate::knobs::PdKnobs;
use crate::rng::Rng;
use crate::routing::DecodeFastPath;

use super::super::least::least;

/// Least drain rate in the drain score, requests per second.
const MIN_DRAIN: f64 = 0.1;

/// The first of three checks that fires picks one pod (reference gateway, section 4.5):
///
/// 1. counts of pods with fresh metrics, or with requests of the gateway's own since their engine started: `max − min`
///    *at least* the spread → the least count;
/// 2. throughputs: `max − min` *above* the spread → the lowest throughput;
/// 3. every pod has a drain rate above 0: `count / max(drain, 0.1)`, the least above 0 and `max / min` *above* the
///    ratio → the least score.
///
/// `ids` are the candidates that step 1 left, indices into `facts`. Ties are broken at random.
pub(in super::super) fn fast_path(
    facts: &[Facts],
    ids: &[usize],
    knobs: &PdKnobs,
    rng: &mut Rng,
) -> Option<(usize, DecodeFastPath)> {
    let all = || ids.iter().filter_map(|id| Some((*id, facts.get(*id)?)));
    let counts: Vec<(f64, usize)> = all().filter(|(_, f)| f.fresh || f.served).map(|(id, f)| (f.count, id)).collect();
    if counts.len() > 1 && spread(&counts) >= knobs.decode_imbalance_min_spread {
        return least(counts, rng).map(|(id, _)| (id, DecodeFastPath::RequestSpread));
    }
    let throughputs: Vec<(f64, usize)> = all().filter_map(|(id, f)| Some((f.throughput?, id))).collect();
    if throughputs.len() > 1 && spread(&throughputs) > knobs.decode_throughput_min_spread {
        return least(throughputs, rng).map(|(id, _)| (id, DecodeFastPath::ThroughputSpread));
    }
    let score = |f: &Facts| f.drain.filter(|drain| *drain > 0.0).map(|drain| f.count / drain.max(MIN_DRAIN));
    let scores: Vec<(f64, usize)> = all().filter_map(|(id, f)| Some((score(f)?, id))).collect();
    if scores.len() == ids.len() && scores.len() > 1 {
        let (min, max) = bounds(&scores);
        if min > 0.0 && max / min > knobs.decode_score_ratio {
            return least(scores, rng).map(|(id, _)| (id, DecodeFastPath::DrainScore));
        }
    }
    None
}

fn bounds(values: &[(f64, usize)]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), (value, _)| (min.min(*value), max.max(*value)))
}

fn spread(values: &[(f64, usize)]) -> f64 {
    let (min, max) = bounds(values);
    max - min
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh(count: f64, throughput: Option<f64>, drain: Option<f64>) -> Facts {
        Facts { own: count, count, fresh: true, throughput, drain, free: 100.0, ..Facts::default() }
    }

    fn run(facts: &[Facts]) -> Option<(usize, DecodeFastPath)> {
        let ids: Vec<usize> = (0..facts.len()).collect();
        fast_path(facts, &ids, &PdKnobs::default(), &mut Rng::new(1))
    }

    #[test]
    fn request_spread_fires_at_its_bound() {
        let counts = |a, b| run(&[fresh(a, None, None), fresh(b, None, None)]);
        assert_eq!(counts(15.9, 0.0), None);
        assert_eq!(counts(16.0, 0.0), Some((1, DecodeFastPath::RequestSpread)));
        assert_eq!(counts(1.0, 18.0), Some((0, DecodeFastPath::RequestSpread)));
    }

    #[test]
    fn throughput_spread_fires_above_its_bound() {
        let rates = |a, b| run(&[fresh(1.0, Some(a), None), fresh(1.0, Some(b), None)]);
        assert_eq!(rates(2048.0, 0.0), None);
        assert_eq!(rates(2048.5, 0.0), Some((1, DecodeFastPath::ThroughputSpread)));
        // A pod that reports none is not one with none.
        assert_eq!(run(&[fresh(1.0, Some(9999.0), None), fresh(1.0, None, None)]), None);
    }

    #[test]
    fn drain_score_fires_above_its_ratio_and_only_when_all_report() {
        let two = |a: (f64, f64), b: (f64, f64)| run(&[fresh(a.0, None, Some(a.1)), fresh(b.0, None, Some(b.1))]);
        assert_eq!(two((3.0, 1.0), (2.0, 1.0)), None);
        assert_eq!(two((3.1, 1.0), (2.0, 1.0)), Some((1, DecodeFastPath::DrainScore)));
        assert_eq!(two((4.0, 4.0), (2.0, 1.0)), Some((0, DecodeFastPath::DrainScore)));
        // An idle pod scores 0, which no ratio can be made of.
        assert_eq!(two((4.0, 1.0), (0.0, 1.0)), None);
        // The floor: 0.01 counts as 0.1.
        assert_eq!(two((1.0, 0.01), (10.0, 1.0)), None);
        assert_eq!(two((4.0, 0.0), (1.0, 1.0)), None);
        assert_eq!(run(&[fresh(9.0, None, Some(1.0)), fresh(1.0, None, None)]), None);
    }

    #[test]
    fn the_first_check_that_fires_decides() {
        let facts = [fresh(20.0, Some(0.0), Some(10.0)), fresh(1.0, Some(5000.0), Some(0.1))];
        assert_eq!(run(&facts), Some((1, DecodeFastPath::RequestSpread)));
        let facts = [fresh(10.0, Some(0.0), Some(1.0)), fresh(1.0, Some(5000.0), Some(1.0))];
        assert_eq!(run(&facts), Some((0, DecodeFastPath::ThroughputSpread)));
    }

    #[test]
    fn cold_pods_take_no_part_in_the_spread() {
        let cold = Facts { free: 100.0, ..Facts::default() };
        assert_eq!(run(&[fresh(40.0, None, None), fresh(40.0, None, None), cold]), None);
        let chosen = run(&[fresh(40.0, None, None), fresh(20.0, None, None), cold]);
        assert_eq!(chosen, Some((1, DecodeFastPath::RequestSpread)), "the least of the known ones");
    }

    #[test]
    fn without_metrics_the_gateways_own_counts_make_the_spread() {
        let own = |count| Facts { own: count, count, served: true, free: 100.0, ..Facts::default() };
        assert_eq!(run(&[own(15.0), own(0.0)]), None);
        assert_eq!(run(&[own(16.0), own(0.0)]), Some((1, DecodeFastPath::RequestSpread)));
        // One pod's page cannot be read: it takes part all the same.
        assert_eq!(run(&[fresh(40.0, None, None), own(3.0)]), Some((1, DecodeFastPath::RequestSpread)));
        assert_eq!(run(&[own(40.0), fresh(3.0, None, None)]), Some((1, DecodeFastPath::RequestSpread)));
    }

    #[test]
    fn nobody_and_one_alone_never_fire() {
        assert_eq!(run(&[]), None);
        assert_eq!(run(&[fresh(500.0, Some(1e9), Some(0.5))]), None);
    }
}
