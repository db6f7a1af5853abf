//! Replicas that decide at the same time.
//!
//! Replicas with the same view pick the same pod, and a pod that looked idle a moment ago gets a request from each. So a
//! replica assumes that some requests which it cannot see yet have gone before its own, to where it would have sent them
//! itself, and decides after them. How many depends on its rank, which spreads the replicas over the whole group of those
//! who decide at once, and on the size of that group, which is learned ([`Peers::unseen`]). Where candidates are equal,
//! those who decide together break the tie alike, or each would see the others take another pod than they do. A lone
//! replica, one whose peers are asked before anything is committed, and one that never misses a request assume nothing.

use super::Peers;
use super::least::{Least, least};
use super::pair::Winner;
use crate::rng::Rng;

/// More requests are not assumed: what they cost to place is bounded.
const MAX_AHEAD: usize = 32;
/// From this size of the group on ties are broken together: smaller, most selections have nobody beside them.
const COMPANY: f64 = 2.0;

/// How many requests are decided on at once. Each sees half of the others' come before it, on average; and where the others
/// place more than one each, so does this one.
fn group(peers: Peers) -> f64 {
    let theirs = 2.0 * peers.unseen;
    if peers.count <= 1 || !theirs.is_finite() {
        return 1.0;
    }
    theirs.max(0.0) + (theirs / f64::from(peers.count - 1)).max(1.0)
}

/// How many requests of others a replica assumes to go before its own.
pub(super) fn ahead(peers: Peers) -> usize {
    let group = group(peers);
    if group <= 1.0 {
        return 0;
    }
    // A cast of a float saturates.
    ((place(peers.rank, peers.count) * group) as usize).min(MAX_AHEAD)
}

/// Among more replicas places are not counted out: that keeps what they cost to find bounded.
const MOST_COUNTED: u32 = 1_024;

/// Where a rank stands among `count`, from 0 to 1, in the order of the ranks with their bits reversed (van der Corput), so
/// that any run of ranks is spread over the whole. Ranks below `count` have the middle of one of so many parts each. Others
/// (there are some after replicas have come and gone) stand where nearly as few others are.
fn place(rank: u32, count: u32) -> f64 {
    let (count, reversed) = (count.max(1), rank.reverse_bits());
    let part = if rank < count && count <= MOST_COUNTED {
        (0..count).filter(|other| other.reverse_bits() < reversed).count() as u64
    } else {
        (u64::from(reversed) * u64::from(count)) >> 32
    };
    (part as f64 + 0.5) / f64::from(count)
}

/// True when ties are broken as the others of the group break them.
pub(super) fn company(peers: Peers) -> bool {
    group(peers) >= COMPANY
}

/// What ties are broken with: chance, or the same for all who decide together with the same view. Each step of a decision
/// has dice of its own, since not all of them take every step.
#[derive(Debug)]
pub(super) struct Dice<'a> {
    /// For whatever concerns nobody else.
    pub(super) own: &'a mut Rng,
    shared: Option<[Rng; 3]>,
}

impl Dice<'_> {
    pub(super) fn new(peers: Peers, own: &mut Rng) -> Dice<'_> {
        let step = |step: u64| Rng::new(peers.view.wrapping_mul(4).wrapping_add(step));
        Dice { own, shared: company(peers).then(|| [0, 1, 2].map(step)) }
    }

    /// For a step, from 0 to 2.
    pub(super) fn of(&mut self, step: usize) -> &mut Rng {
        match self.shared.as_mut().and_then(|shared| shared.get_mut(step)) {
            Some(shared) => shared,
            None => self.own,
        }
    }
}

/// The answer of a fast path after `ahead` others have gone the same way. `answer` looks at the loads, `charge` adds one
/// request to them.
pub(super) fn after<L, A: Copy>(
    ahead: usize,
    loads: &L,
    mut answer: impl FnMut(&L) -> Option<A>,
    charge: impl Fn(&mut L, A),
) -> Option<A>
where
    L: Clone,
{
    let first = answer(loads)?;
    if ahead == 0 {
        return Some(first);
    }
    let (mut loads, mut last) = (loads.clone(), first);
    for _ in 0..ahead {
        charge(&mut loads, last);
        last = answer(&loads)?;
    }
    Some(last)
}

/// The least of `scored` (score, id) after `ahead` others have taken the least before, each adding `step` to what it
/// took; with its score then, and with how many it shares that.
pub(super) fn single(
    scored: impl Iterator<Item = (f64, usize)>,
    step: f64,
    ahead: usize,
    rng: &mut Rng,
) -> Option<((usize, f64), usize)> {
    let mut scored: Vec<(f64, usize)> = scored.collect();
    for turn in 0..=ahead {
        let mut best = Least::default();
        for (place, (score, _)) in scored.iter().enumerate() {
            best.offer(*score, place, rng);
        }
        let (place, score) = best.winner()?;
        let (charged, id) = scored.get_mut(place)?;
        if turn == ahead {
            return Some(((*id, score), best.ties()));
        }
        *charged += step;
    }
    None
}

/// The scored candidates of one side.
#[derive(Debug)]
pub(super) struct Side {
    /// By roleset: score and candidate.
    pub(super) rolesets: Vec<Vec<(f64, usize)>>,
    /// What one more request adds to a score.
    pub(super) step: f64,
    /// What scores are divided by.
    pub(super) max: f64,
}

impl Side {
    /// Of candidates as (roleset, score, id).
    pub(super) fn new(rolesets: usize, scored: impl Iterator<Item = (usize, f64, usize)>, step: f64, max: f64) -> Side {
        let mut sides = vec![Vec::new(); rolesets];
        for (roleset, score, id) in scored {
            if let Some(side) = sides.get_mut(roleset) {
                side.push((score, id));
            }
        }
        Side { rolesets: sides, step, max }
    }

    /// Place and score of the best candidate of a roleset.
    fn best(&self, roleset: usize, rng: &mut Rng) -> Option<(usize, f64)> {
        least(self.rolesets.get(roleset)?.iter().enumerate().map(|(place, (score, _))| (*score, place)), rng)
    }

    /// Adds one request to a candidate.
    fn charge(&mut self, roleset: usize, place: usize) {
        if let Some((score, _)) = self.rolesets.get_mut(roleset).and_then(|side| side.get_mut(place)) {
            *score += self.step;
        }
    }

    fn id(&self, roleset: usize, place: usize) -> Option<usize> {
        Some(self.rolesets.get(roleset)?.get(place)?.1)
    }
}

/// The pair that is best after `ahead` requests of others have taken the best pairs before. The scores of the winner are
/// those after them. `may` says whether two candidates may meet.
pub(super) fn pair(
    [mut prefills, mut decodes]: [Side; 2],
    ahead: usize,
    may: impl Fn(usize, usize) -> bool,
    rng: &mut Rng,
) -> Option<Winner> {
    let best = |prefills: &Side, decodes: &Side, roleset: usize, rng: &mut Rng| {
        let total = |prefill: f64, decode: f64| prefill / prefills.max + decode / decodes.max;
        let (prefill, decode) = (prefills.best(roleset, rng)?, decodes.best(roleset, rng)?);
        if may(prefills.id(roleset, prefill.0)?, decodes.id(roleset, decode.0)?) {
            return Some((total(prefill.1, decode.1), prefill, decode));
        }
        let mut partners = Least::default();
        for (at, (prefill, id)) in prefills.rolesets.get(roleset)?.iter().enumerate() {
            for (other, (decode, with)) in decodes.rolesets.get(roleset)?.iter().enumerate() {
                if may(*id, *with) {
                    let total = total(*prefill, *decode);
                    partners.offer(total, (total, (at, *prefill), (other, *decode)), rng);
                }
            }
        }
        partners.winner().map(|(found, _)| found)
    };
    let mut pairs: Vec<_> = (0..prefills.rolesets.len()).map(|set| best(&prefills, &decodes, set, rng)).collect();
    for turn in 0..=ahead {
        let mut winners = Least::default();
        for (roleset, pair) in pairs.iter().enumerate() {
            if let Some((total, prefill, decode)) = pair {
                winners.offer(*total, (roleset, *prefill, *decode), rng);
            }
        }
        let ((roleset, prefill, decode), total) = winners.winner()?;
        if turn == ahead {
            return Some(Winner {
                prefill: prefills.id(roleset, prefill.0)?,
                prefill_score: prefill.1,
                decode: decodes.id(roleset, decode.0)?,
                decode_score: decode.1,
                total,
                ties: winners.ties(),
            });
        }
        prefills.charge(roleset, prefill.0);
        decodes.charge(roleset, decode.0);
        if let Some(pair) = pairs.get_mut(roleset) {
            *pair = best(&prefills, &decodes, roleset, rng);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(rank: u32, count: u32, unseen: f64) -> Peers {
        Peers { rank, count, unseen, view: 0 }
    }

    #[test]
    fn who_is_alone_or_sees_everything_assumes_nothing() {
        for alone in
            [Peers::ALONE, peers(0, 0, 9.0), peers(7, 1, 9.0), peers(3, 16, f64::NAN), peers(3, 16, f64::INFINITY)]
        {
            assert_eq!(ahead(alone), 0, "{alone:?}");
        }
        assert!((0..100).all(|rank| ahead(peers(rank, 100, 0.0)) == 0));
    }

    #[test]
    fn ranks_fill_the_group_evenly() {
        for (count, unseen) in [(16u32, 4.5), (16, 7.5), (8, 1.5), (100, 0.2), (10, 4.5), (7, 3.0)] {
            let group: f64 = 1.0 + 2.0 * unseen;
            let mut places = vec![0u32; group.ceil() as usize];
            for rank in 0..count {
                places[ahead(peers(rank, count, unseen))] += 1;
            }
            let even = f64::from(count) / group;
            for (place, ranks) in places.iter().enumerate() {
                // The last place may be a part of one.
                let width = (group - place as f64).min(1.0);
                assert!((f64::from(*ranks) - even * width).abs() < 1.0, "{count} {unseen}: {places:?}");
            }
        }
        // Reversed: 0, 4, 2, 6, 1.
        assert_eq!([0, 1, 2, 3, 4].map(|rank| place(rank, 5)), [0.1, 0.7, 0.5, 0.9, 0.3]);
        assert_eq!(ahead(peers(3, 5, 1e9)), MAX_AHEAD);
        // An average that is a little off must not put the last two into one place.
        assert_eq!((0..8).map(|rank| ahead(peers(rank, 8, 3.49))).collect::<std::collections::BTreeSet<_>>().len(), 8);
    }

    #[test]
    fn the_group_is_the_others_and_ones_own() {
        let of = |count, unseen| group(peers(0, count, unseen));
        // Ten requests for four replicas: 7.5 are the others'.
        let groups = [of(4, 0.0), of(4, 0.5), of(4, 1.5), of(4, 3.75), of(16, 4.5), of(2, 4.5), of(4, -1.0)];
        assert_eq!(groups, [1.0, 2.0, 4.0, 10.0, 10.0, 18.0, 1.0]);
    }

    #[test]
    fn every_count_gives_each_rank_a_part_of_its_own() {
        for count in (1..200).chain([1_000, 1_024]) {
            let mut parts: Vec<f64> = (0..count).map(|rank| place(rank, count) * f64::from(count)).collect();
            parts.sort_by(f64::total_cmp);
            let own = parts.iter().zip(0..).all(|(part, index)| (part - f64::from(index) - 0.5).abs() < 1e-6);
            assert!(own, "{count}: {parts:?}");
        }
        assert_eq!((place(0, 0), place(7, 1)), (0.5, 0.5));
        let parts = [0, 1, 2, 3, u32::MAX].map(|rank| (place(rank, 2_000) * 20_000.0).round() / 10.0);
        assert_eq!(parts, [0.5, 1_000.5, 500.5, 1_500.5, 1_999.5]);
        // All replicas were replaced, one by one.
        for count in [2, 4, 16, 64] {
            let mut parts: Vec<f64> = (count..2 * count).map(|rank| place(rank, count) * f64::from(count)).collect();
            parts.sort_by(f64::total_cmp);
            assert!(parts.iter().zip(0..).all(|(part, index)| (*part as i32) == index), "{count}: {parts:?}");
        }
    }

    /// Requests go to replicas in turn, so those who decide at once are neighbours.
    #[test]
    fn neighbours_stand_apart() {
        for (count, run) in [(16u32, 10u32), (16, 4), (10, 5), (7, 3), (100, 8)] {
            let taken = |rank| ahead(peers(rank % count, count, f64::from(run - 1) / 2.0));
            let distinct = |first| (first..first + run).map(taken).collect::<std::collections::BTreeSet<_>>().len();
            // At random, two of three would be.
            let mean = (0..count).map(distinct).sum::<usize>() as f64 / f64::from(count * run);
            assert!(mean > 0.8, "{count} {run}: {mean} of the places are taken");
        }
    }

    #[test]
    fn ties_are_broken_alike_in_company_only() {
        let rolled = |peers, step, seed| Dice::new(peers, &mut Rng::new(seed)).of(step).next_u64();
        let at = |view| Peers { view, ..peers(1, 8, 2.0) };
        assert_eq!(rolled(at(3), 0, 1), rolled(Peers { rank: 5, ..at(3) }, 0, 2));
        assert_ne!(rolled(at(3), 0, 1), rolled(at(4), 0, 1), "the next time it is another's turn");
        assert_ne!(rolled(at(3), 0, 1), rolled(at(3), 1, 1));
        for lonely in [Peers::ALONE, peers(1, 8, 0.49), peers(1, 8, f64::NAN), peers(1, 8, -3.0)] {
            assert!(!company(lonely));
            assert_eq!(rolled(lonely, 0, 1), Rng::new(1).next_u64(), "{lonely:?}");
        }
    }

    #[test]
    fn single_pods_are_taken_in_turn() {
        let found = |ahead| single([(2.0, 7), (0.0, 8), (1.0, 9)].into_iter(), 1.5, ahead, &mut Rng::new(1));
        assert_eq!(found(0), Some(((8, 0.0), 1)));
        assert_eq!(found(1), Some(((9, 1.0), 1)));
        assert_eq!(found(2), Some(((8, 1.5), 1)));
        assert_eq!(single(std::iter::empty(), 1.0, 2, &mut Rng::new(1)), None);
    }

    fn sides(prefills: &[f64], decodes: &[f64], step: f64) -> [Side; 2] {
        let side = |scores: &[f64]| {
            let scored = scores.iter().enumerate().map(|(id, score)| (id, *score, id));
            Side::new(scores.len(), scored, step, 10.0)
        };
        [side(prefills), side(decodes)]
    }

    #[test]
    fn the_others_take_the_best_pairs_first() {
        let winners = |step| {
            (0..5).map(move |ahead| {
                let sides = sides(&[0.0, 3.0, 6.0], &[0.0, 3.0, 6.0], step);
                pair(sides, ahead, |_, _| true, &mut Rng::new(1)).unwrap()
            })
        };
        let ids: Vec<usize> = winners(4.0).map(|winner| winner.prefill).collect();
        // 0, then 1 (3 < 4), then 0 again (4 < 6), then 2 (6 < 7), then 1 (7 < 8).
        assert_eq!(ids, [0, 1, 0, 2, 1]);
        assert!(winners(4.0).all(|winner| winner.prefill == winner.decode && winner.ties == 1));
        let totals: Vec<f64> = winners(4.0).map(|winner| winner.total).collect();
        assert!(totals.iter().zip([0.0, 0.6, 0.8, 1.2, 1.4]).all(|(a, b)| (a - b).abs() < 1e-9), "{totals:?}");
        assert!(winners(0.0).all(|winner| winner.prefill == 0), "where a request adds nothing, nothing changes");
    }

    #[test]
    fn pods_of_one_roleset_are_taken_in_turn() {
        let scored = |scores: [f64; 3]| scores.into_iter().enumerate().map(|(id, score)| (0, score, id));
        let mut seen = Vec::new();
        for ahead in 0..3 {
            let prefills = Side::new(1, scored([1.0, 0.0, 2.0]), 5.0, 1.0);
            let decodes = Side::new(1, scored([2.0, 1.0, 0.0]), 5.0, 1.0);
            let winner = pair([prefills, decodes], ahead, |_, _| true, &mut Rng::new(1)).unwrap();
            seen.push((winner.prefill, winner.decode));
        }
        assert_eq!(seen, [(1, 2), (0, 1), (2, 0)]);
    }

    #[test]
    fn a_roleset_without_a_side_never_wins() {
        let prefills = || Side::new(2, [(0, 0.0, 0), (1, 9.0, 1)].into_iter(), 1.0, 1.0);
        let decodes = Side::new(2, [(1, 0.0, 5)].into_iter(), 1.0, 1.0);
        let winner = pair([prefills(), decodes], 3, |_, _| true, &mut Rng::new(1)).unwrap();
        assert_eq!((winner.prefill, winner.decode), (1, 5));
        let none = Side::new(2, std::iter::empty(), 1.0, 1.0);
        assert_eq!(pair([prefills(), none], 1, |_, _| true, &mut Rng::new(1)), None);
    }

    #[test]
    fn nobody_is_sent_to_a_pair_that_may_not_meet() {
        let scored = |scores: [f64; 2]| scores.into_iter().enumerate().map(|(id, score)| (0, score, id));
        let find = |forbidden: &[(usize, usize)], ahead| {
            let sides = [[1.0, 2.0], [1.0, 4.0]].map(|scores| Side::new(1, scored(scores), 1.5, 1.0));
            let may = |prefill, decode| !forbidden.contains(&(prefill, decode));
            pair(sides, ahead, may, &mut Rng::new(1)).map(|winner| (winner.prefill, winner.decode))
        };
        assert_eq!([find(&[], 0), find(&[(0, 0)], 0), find(&[(0, 0), (1, 0)], 0)], [(0, 0), (1, 0), (0, 1)].map(Some));
        assert_eq!(find(&[(0, 0), (0, 1)], 1), Some((1, 0)), "3.5 + 2.5 is less than 3.5 + 4");
        assert_eq!(find(&[(0, 0), (0, 1), (1, 0), (1, 1)], 1), None);
    }

    #[test]
    fn a_fast_path_is_taken_in_turn_as_long_as_it_fires() {
        // The least count wins, while the spread is above two.
        let answer = |counts: &Vec<u32>| {
            let (least, most) = (*counts.iter().min()?, *counts.iter().max()?);
            (most - least > 2).then(|| counts.iter().position(|count| *count == least)).flatten()
        };
        let charge = |counts: &mut Vec<u32>, id: usize| counts[id] += 1;
        let found: Vec<_> = (0..5).map(|ahead| after(ahead, &vec![1, 0, 4], answer, charge)).collect();
        // [1, 0, 4], [1, 1, 4], [2, 1, 4]; at [2, 2, 4] it no longer fires.
        assert_eq!(found, [Some(1), Some(0), Some(1), None, None]);
    }
}
