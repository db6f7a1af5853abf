//! Every way in which a leg can fail, with every engine: what the client sees, what each engine gets, and how long it takes.
//!
//! The outcome of each cell is held against rules, and the table of all of them against `docs/failures.md`.

mod cells;
mod page;
mod play;
mod promptness;
mod rules;
mod stage;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tandem_sim::Engine;
use tokio::task::JoinSet;

use crate::harness::engines::Backend;
use crate::harness::oracle::oracle;
use cells::{Cell, Dialect};
use play::{Outcome, Played, play};
use rules::Way;
use stage::{ABORT_AGAIN, PREFILL_TIMEOUT, Stage};

/// Between the starts of two cells, so that they do not slow one another down.
const PACE: Duration = Duration::from_millis(30);

/// Nothing more can come after this: the second abort, and the end of a prefill leg that nobody waits for.
const SILENCE: Duration = PREFILL_TIMEOUT.saturating_add(ABORT_AGAIN).saturating_add(Duration::from_millis(500));

/// How often a cell that took too long is tried again, alone.
const TRIES: usize = 4;

#[tokio::test(flavor = "multi_thread")]
async fn matrix_of_failures() {
    let (mut envoy, mut front, mut broken) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    // Two stages at a time: most of the time goes by in waiting for timers.
    for numbers in [vec![0, 1], vec![2, 3], vec![4]] {
        let mut stages = JoinSet::new();
        for number in numbers {
            stages.spawn(async move { (number, run(Dialect::ALL[number], number).await) });
        }
        while let Some(stage) = stages.join_next().await {
            let (number, [through_envoy, through_front]) = stage.expect("a stage");
            for (way, outcomes) in [(Way::Envoy, &through_envoy), (Way::Front, &through_front)] {
                for outcome in outcomes {
                    broken.extend(rules::broken(way, outcome).into_iter().map(|rule| format!("{way:?}: {rule}: {outcome:?}")));
                }
            }
            envoy.insert(number, through_envoy);
            front.insert(number, through_front);
        }
    }
    let tables = page::tables(&envoy, &front);
    println!("{tables}");
    assert!(broken.is_empty(), "{} rules broken:\n{}", broken.len(), broken.join("\n"));
    page::assert_page(&tables);
}

/// Plays all cells of a dialect through Envoy, and those with a patient client through the front.
async fn run(dialect: Dialect, number: usize) -> [Vec<Outcome>; 2] {
    let stage = Arc::new(Stage::set(dialect, |config| config).await);
    let paths = stage.fleet.paths();
    let mut ways = Vec::new();
    let mut cells = Vec::new();
    for (way, path) in paths.iter().enumerate() {
        let own = Cell::all(dialect).into_iter().filter(|cell| way == 0 || !cell.leaves);
        cells.extend(own.map(|cell| (path.clone(), cell)));
        ways.push(cells.len());
    }
    let mut outcomes = act(&stage, &cells, &format!("{number}"), PACE).await;
    for attempt in 1..TRIES {
        let late: Vec<usize> = (0..cells.len()).filter(|index| outcomes[*index].is_late()).collect();
        for index in late {
            let again = act(&stage, &cells[index..=index], &format!("{number}-{attempt}-{index}"), PACE).await;
            outcomes.splice(index..=index, again);
        }
    }
    settle(&stage).await;
    let through_front = outcomes.split_off(ways[0]);
    [outcomes, through_front]
}

/// Plays cells side by side and judges them when nothing more can come.
async fn act(stage: &Arc<Stage>, cells: &[(String, Cell)], name: &str, pace: Duration) -> Vec<Outcome> {
    let mut playing = JoinSet::new();
    for (index, (path, cell)) in cells.iter().cloned().enumerate() {
        let (stage, tag) = (Arc::clone(stage), format!("{name}/{index}"));
        playing.spawn(async move { (index, play(&stage, &path, cell, tag).await) });
        tokio::time::sleep(pace).await;
    }
    let mut played: Vec<(usize, Played)> = Vec::new();
    while let Some(one) = playing.join_next().await {
        played.push(one.expect("a cell"));
    }
    played.sort_by_key(|(index, _)| *index);
    tokio::time::sleep(SILENCE).await;
    played.into_iter().map(|(_, one)| one.judge(stage)).collect()
}

async fn settle(stage: &Stage) {
    let engines = stage.engines().map(|engine| engine as &dyn Backend);
    oracle(&stage.fleet.tandems, &engines).await;
    let metrics = stage.fleet.tandems[0].metrics().await;
    assert_eq!(metrics.sum("tandem_panics_caught_total", &[]), 0.0, "panics");
    for engine in stage.engines() {
        assert!(engine.violations().is_empty(), "{}: {:?}", Engine::address(engine), engine.violations());
    }
}
