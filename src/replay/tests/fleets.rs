//! Fleets of gateways: the virtual plane, a gateway's end of it, claims, and the comparison with one gateway.

use super::super::link::Link;
use super::super::plane::Plane;
use super::*;
use crate::clock::Tick;
use crate::knobs::{DecodePolicy, PrefillPolicy};
use crate::load::{PeerCell, Scope, Share};
use crate::rng::Rng;

const TOKENS: Policies = (PrefillPolicy::TokenLoad, DecodePolicy::TokenLoad);
const DEFAULT: Policies = (PrefillPolicy::PrefixCache, DecodePolicy::LoadBalancing);

fn running(running: u32) -> Share {
    Share { running, ..Share::ZERO }
}

#[test]
fn the_plane_sums_up_what_gateways_publish() {
    let mut plane = Plane::new(3, 3);
    let first = plane.publish(0, 0, &vec![(0, running(1)), (2, running(4))]);
    assert_eq!((first.version, first.others), (2, vec![(0, Share::ZERO), (2, Share::ZERO)]));
    let second = plane.publish(1, 0, &vec![(0, running(2))]);
    assert_eq!((second.version, second.others), (3, vec![(0, running(1)), (2, running(4))]));
    assert_eq!(plane.changed(2, 2).others, [(0, running(3))], "only what is news");
    assert_eq!(plane.changed(0, 2).others, [(0, running(2))], "without its own");
    let again = plane.publish(1, 3, &vec![(0, running(2))]);
    assert_eq!((again.version, again.others.len()), (3, 0), "saying it twice changes nothing");
    assert_eq!(plane.charged(), 7);
    plane.publish(0, 3, &vec![(0, Share::ZERO), (2, Share::ZERO)]);
    plane.publish(1, 3, &vec![(0, Share::ZERO)]);
    assert_eq!(plane.charged(), 0);
}

#[test]
fn a_claim_stands_unless_its_pods_were_charged_meanwhile() {
    for (case, meanwhile, granted) in [
        ("nobody", vec![], true),
        ("another pod", vec![(1, 2, running(1))], true),
        ("the same pod", vec![(1, 0, running(6))], false),
        ("itself", vec![(0, 0, running(6))], true),
        ("released", vec![(1, 0, running(1))], true),
        ("charged, then released", vec![(1, 0, running(6)), (1, 0, running(1))], false),
    ] {
        let mut plane = Plane::new(3, 2);
        let seen = plane.publish(1, 0, &vec![(0, running(5))]).version;
        for (gateway, slot, share) in meanwhile {
            plane.publish(gateway, 0, &vec![(slot, share)]);
        }
        let before = plane.version();
        let answer = plane.claim(0, seen, &vec![(0, running(9)), (1, running(9))]);
        assert_eq!((answer.granted, plane.version() > before), (granted, granted), "{case}");
        assert_eq!(answer.version, plane.version(), "{case}: an answer tells what was not known");
    }
}

#[test]
fn publications_are_at_once_after_quiet_and_paced_else() {
    let at = Tick::from_millis;
    let mut link = Link::new(1, Duration::from_millis(5), Scope::default());
    let own = |share: Share| move |_: usize| share;
    assert_eq!(link.changed(at(100)), Some(at(100)), "at once");
    assert_eq!(link.changed(at(100)), None, "that will tell this change too");
    assert_eq!(link.send(at(99), own(running(1))), None, "not planned");
    assert_eq!(link.send(at(100), own(running(1))), Some((0, vec![(0, running(1))])));
    assert_eq!(link.changed(at(101)), None, "one is on its way");
    assert!(link.dirty(own(running(2))) && !link.dirty(own(running(1))));
    link.answered();
    assert_eq!(link.changed(at(101)), Some(at(105)), "within the pace");
    assert_eq!(link.changed(at(103)), None);
    assert_eq!(link.send(at(105), own(running(1))), Some((0, vec![])), "it was undone meanwhile");
    link.answered();
    assert_eq!(link.changed(at(200)), Some(at(200)));
}

#[test]
fn a_link_passes_on_what_is_new_and_in_scope() {
    let mut link = Link::new(2, Duration::from_millis(5), Scope { prefill: false, ..Scope::default() });
    let peers = PeerCell::default();
    peers.join(0, 2);
    let share = Share { running: 1, pending: 2, prefills: 3, ..Share::ZERO };
    let heard = Share { prefills: 0, ..share };
    let answer =
        |version, share| super::super::plane::Answer { version, others: vec![(1, share), (9, share)], granted: true };
    let at = Tick::from_millis;
    peers.selected(at(10));
    assert_eq!(link.take_in(answer(4, share), &peers, peers.selections(), at(12)), [(1, heard)]);
    assert_eq!((link.seen(), link.take_in(answer(5, share), &peers, 0, at(15))), (4, vec![]));
    assert_eq!((link.seen(), peers.view().view), (5, 5));
    assert!((peers.view().unseen - 1.5).abs() < 1e-9, "half of three newcomers");
}

/// Requests as they come: exponential gaps, prompts of very different lengths.
fn arrivals(count: usize, per_second: f64, seed: u64) -> Trace {
    let mut rng = Rng::new(seed);
    let mut now = 0.0;
    let mut requests = trace(&vec![(0, 1, 1); count]).requests;
    for request in &mut requests {
        now -= (1.0 - rng.unit()).ln() / per_second;
        request.at = Duration::from_secs_f64(now);
        request.prompt = 100 + (rng.unit().powi(3) * 4_000.0) as u64;
        request.output = 20 + rng.below(150) as u64;
    }
    let first = requests.first().map_or(Duration::ZERO, |request| request.at);
    for request in &mut requests {
        request.at -= first;
    }
    Trace { requests, ..trace(&[(0, 1, 1)]) }
}

fn fleet_options(gateways: usize, sharing: Sharing) -> ReplayOptions {
    ReplayOptions { gateways, sharing, ..options((8, 8, 8), Arc::new(EngineModel::default())) }
}

#[test]
fn one_gateway_does_not_care_what_it_shares() {
    let trace = arrivals(300, 30.0, 3);
    for policies in [TOKENS, DEFAULT] {
        let courses =
            Sharing::ALL.map(|sharing| run_one(&trace, &fleet_options(1, sharing), policies, &quiet).unwrap().courses);
        assert!(courses.iter().all(|one| *one == courses[0]), "{policies:?}");
    }
}

#[test]
fn fleets_leave_nothing_behind_and_repeat_themselves() {
    let trace = arrivals(250, 40.0, 4);
    for policies in [TOKENS, DEFAULT] {
        for sharing in Sharing::ALL {
            // It fails when a charge stays on a gateway or in the plane.
            let [a, b] = [(); 2].map(|()| run_one(&trace, &fleet_options(5, sharing), policies, &quiet).unwrap());
            assert_eq!(a.courses, b.courses, "{sharing:?}");
        }
    }
}

#[test]
fn r63_claims_schedule_like_one_gateway_and_nothing_shared_does_not() {
    let trace = arrivals(900, 38.0, 5);
    let scenes = [Scene { name: "arrivals".to_owned(), trace, load: 0.6, policies: TOKENS }];
    let fleets = Fleets { replicas: &[4], sharing: &[Sharing::None, Sharing::Paced, Sharing::Claim], seeds: 4 };
    let compared = compare(&scenes, fleets, &fleet_options(1, Sharing::None), 2, &quiet).unwrap();
    let [none, paced, claim] = [0, 1, 2].map(|place: usize| compared[place].multiples());
    assert!(claim.iter().all(|multiple| (multiple - 1.0).abs() < 0.05), "claim {claim:?}");
    // Nine hundred requests at such a load leave some per cent to chance.
    assert!(paced[0] < 1.08 && paced[1] < 1.15 && paced[2] < 1.04, "paced {paced:?}");
    assert!(none[0] > 1.05 && none[1] > 1.15, "none {none:?}");
}

/// Ten requests in the same instant, again and again, for ten gateways with the same view.
#[test]
fn bursts_are_spread_although_nobody_sees_the_others() {
    let mut rng = Rng::new(6);
    let rows: Vec<(u64, u64, u64)> = (0..60)
        .flat_map(|burst| (0..10).map(move |_| burst * 2_000))
        .map(|at| (at, 500 + rng.below(3_000) as u64, 40))
        .collect();
    let options = ReplayOptions { shape: FleetShape::new(16, 16, None).unwrap(), ..fleet_options(1, Sharing::None) };
    let scenes = [Scene { name: "bursts".to_owned(), trace: trace(&rows), load: 0.1, policies: TOKENS }];
    let fleets = Fleets { replicas: &[10], sharing: &[Sharing::Paced, Sharing::Claim], seeds: 1 };
    let compared = compare(&scenes, fleets, &options, 2, &quiet).unwrap();
    let [paced, claim] = [0, 1].map(|place: usize| compared[place].multiples());
    assert!(claim[0] < 1.05 && claim[1] < 1.1, "claim {claim:?}");
    assert!(paced[0] < 1.3 && paced[1] < 1.6, "paced {paced:?}");
}

#[test]
fn the_comparison_does_not_depend_on_threads() {
    let scene = |policies, load| Scene { name: "t".to_owned(), trace: arrivals(60, 30.0, 7), load, policies };
    let scenes = [scene(TOKENS, 0.5), scene(DEFAULT, 0.7)];
    let run = |threads| {
        let fleets = Fleets { replicas: &[2, 3], sharing: &[Sharing::None, Sharing::Paced], seeds: 2 };
        compare(&scenes, fleets, &fleet_options(1, Sharing::None), threads, &quiet).unwrap()
    };
    let (one, many) = (run(1), run(7));
    assert_eq!(one, many);
    let table = comparison_table(&one);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "| trace | policies | N | load | one gateway | none | paced |");
    assert_eq!((lines[1], lines.len()), ("|---|---|---|---|---|---|---|", 2 + 4));
    assert!(lines[2].starts_with("| t | token_load/token_load | 2 | 0.5 | "), "{table}");
    assert!(lines[5].starts_with("| t | prefix_cache/load_balancing | 3 | 0.7 | "), "{table}");
    assert_eq!(lines[2].matches(" / ").count(), 6, "three numbers in each cell: {table}");
}

#[test]
fn instants_are_spread_up_to_the_next() {
    let even = trace(&[(0, 1, 1), (0, 2, 1), (0, 3, 1), (3_000, 4, 1), (4_000, 5, 1), (4_000, 6, 1)]).evened();
    let moments: Vec<u128> = even.requests.iter().map(|request| request.at.as_millis()).collect();
    assert_eq!(moments, [0, 1_000, 2_000, 3_000, 4_000, 4_000]);
    assert_eq!(even.evened().requests.iter().map(|request| request.at.as_millis()).collect::<Vec<_>>(), moments);
}

#[test]
fn load_is_work_over_time() {
    let engine = engine(&["prefill_ms=100"]);
    let trace = trace(&[(0, 1, 1), (500, 1, 1), (1_000, 1, 1)]);
    assert!((offered_load(&trace, &engine, 2) - 0.15).abs() < 1e-9);
    assert!((offered_load(&trace.faster(2.0), &engine, 2) - 0.3).abs() < 1e-9);
    assert_eq!(offered_load(&super::trace(&[(0, 1, 1)]), &engine, 2), 0.0);
}
