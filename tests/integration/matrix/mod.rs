//! Every way in which a leg can fail, with every engine: what the client sees, what each engine gets, and how long it takes.
//!
//! The outcome of each cell is held against rules, and the table of all of them against `docs/failures.md`.

mod blame;
mod cells;
mod page;
mod play;
mod promptness;
mod rules;
mod stage;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tandem_sim::Engine;
use tokio::task::JoinSet;

use crate::harness::SOON;
use crate::harness::engines::Backend;
use crate::harness::metrics::Metrics;
use crate::harness::oracle::oracle;
use cells::{Cell, Dialect};
use play::{Outcome, Played, play};
use rules::Way;
use stage::{ABORT_AGAIN, PREFILL_TIMEOUT, Stage};

/// Between the starts of two cells, so that they do not slow one another down.
const PACE: Duration = Duration::from_millis(30);

/// The same for cells that are tried again because they took too long.
const SLOW_PACE: Duration = Duration::from_millis(250);

/// Nothing more can come after this: the second abort, and the end of a prefill leg that nobody waits for.
const SILENCE: Duration = PREFILL_TIMEOUT.saturating_add(ABORT_AGAIN).saturating_add(Duration::from_millis(500));

/// How often a cell may be tried until it is as quick as it should be.
const TRIES: usize = 4;

#[tokio::test(flavor = "multi_thread")]
async fn matrix_of_failures() {
    let (mut envoy, mut front, mut broken) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    // Two stages at a time: most of the time goes by in waiting for timers.
    for numbers in [vec![0, 1], vec![2, 3], vec![4]] {
        let stages = numbers.into_iter().map(async |number| (number, run(Dialect::ALL[number], number).await));
        for (number, [through_envoy, through_front]) in join_all(stages).await {
            for (way, outcomes) in [(Way::Envoy, &through_envoy), (Way::Front, &through_front)] {
                for outcome in outcomes {
                    broken.extend(
                        rules::broken(way, outcome).into_iter().map(|rule| format!("{way:?}: {rule}: {outcome:?}")),
                    );
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
    let stage = Arc::new(Stage::set(dialect, &[]).await);
    let mut cells = Vec::new();
    for way in [Way::Envoy, Way::Front] {
        let own = Cell::all(dialect).into_iter().filter(|cell| way == Way::Envoy || !cell.leaves);
        cells.extend(own.map(|cell| (way, cell)));
    }
    let mut outcomes = act(&stage, &cells, &number.to_string(), PACE).await;
    for attempt in 1..TRIES {
        let late: Vec<usize> = (0..cells.len()).filter(|index| outcomes[*index].is_late()).collect();
        if late.is_empty() {
            break;
        }
        let again: Vec<_> = late.iter().map(|index| cells[*index]).collect();
        let better = act(&stage, &again, &format!("{number}-{attempt}"), SLOW_PACE).await;
        for (index, outcome) in late.into_iter().zip(better) {
            outcomes[index] = outcome;
        }
    }
    settle(&stage).await;
    let through_front = outcomes.split_off(cells.iter().filter(|(way, _)| *way == Way::Envoy).count());
    [outcomes, through_front]
}

/// Plays cells side by side and judges them when nothing more can come.
async fn act(stage: &Arc<Stage>, cells: &[(Way, Cell)], name: &str, pace: Duration) -> Vec<Outcome> {
    let mut playing = JoinSet::new();
    for (index, (way, cell)) in cells.iter().copied().enumerate() {
        let (stage, tag) = (Arc::clone(stage), format!("{name}/{index}"));
        playing.spawn(async move { (index, play(&stage, way, cell, tag).await) });
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
    // Blocks that failures have left behind.
    let free = |metrics: &Metrics| metrics.sum("tandem_token_load_stranded_tokens", &[]) == 0.0;
    stage.fleet.tandems[0].wait_metrics(SOON, "no charge is left of a failure", free).await;
    let engines = stage.engines().map(|engine| engine as &dyn Backend);
    oracle(&stage.fleet.tandems, &engines).await;
    let metrics = stage.fleet.tandems[0].metrics().await;
    assert_eq!(metrics.sum("tandem_panics_caught_total", &[]), 0.0, "panics");
    for engine in stage.engines() {
        assert!(engine.violations().is_empty(), "{}: {:?}", Engine::address(engine), engine.violations());
    }
}
