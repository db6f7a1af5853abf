//! The first requests of a public trace of conversations, scaled down and sped up, through Envoy.
//!
//! Scale: a block of the trace (512 tokens) becomes 256 bytes, that is 64 tokens of the simulators, so prompts shrink
//! to an eighth; outputs to a sixteenth. Blocks of equal ids are equal byte for byte, so prefixes stay shared.
//!
//! Time: the trace's 165 s take 16.5 s (ten times as fast). What arrives is 14,162 blocks, 906,000 prompt tokens, of
//! which an infinite cache would save a sixth: 46,000 tokens/s to compute, 11,500 for each of 4 prefill engines, which do
//! 24,000. Outputs are 11,300 tokens, 686 tokens/s, 171 for each of 4 decode engines, whose throughput tends to
//! 1 / 3 ms = 333. Both sides run at about half of what they can do.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use flate2::read::GzDecoder;
use serde::Deserialize;
use serde_json::{Value, json};
use tandem_sim::{BLOCK_TOKENS, BYTES_PER_TOKEN, Engine, EngineConfig, Timing};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Dice, Pair, fleet_shows, pod_of, routable, settle, settle_pairs};
use crate::harness::engines::{MODEL, pd_by_default};
use crate::harness::envoy::{Envoy, EnvoyOptions};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::Call;
use crate::harness::tandem::Tandem;
use crate::harness::{within, within_time};

const TRACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/mooncake-first-500.jsonl.gz");
const SPEED_UP: u32 = 10;
const BLOCK_BYTES: usize = 256;
const OUTPUT_SCALE: u32 = 16;
/// Some forty requests are in flight on average. A machine that cannot keep up delays arrivals instead of piling them up.
const MOST_IN_FLIGHT: usize = 48;

#[derive(Clone, Debug, Deserialize)]
struct Row {
    /// Milliseconds.
    timestamp: u64,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Row {
    fn due(&self) -> Duration {
        Duration::from_millis(self.timestamp) / SPEED_UP
    }

    fn output(&self) -> u32 {
        (self.output_length / OUTPUT_SCALE).max(1)
    }

    fn prompt(&self) -> String {
        self.hash_ids.iter().map(|id| block(*id)).collect()
    }
}

fn rows() -> Vec<Row> {
    let file = std::fs::File::open(TRACE).expect("the trace");
    let lines = BufReader::new(GzDecoder::new(file)).lines();
    lines.map(|line| serde_json::from_str(&line.expect("a line")).expect("a row")).collect()
}

/// The text that stands for a block.
fn block(id: u64) -> String {
    let mut dice = Dice(id);
    (0..BLOCK_BYTES).map(|_| char::from(b"etaoin shrdlu cmfw"[dice.below(18)])).collect()
}

/// Prompt tokens that one cache which never forgets would save: the leading blocks that were there before, without
/// the engine's last block when that is the whole prompt (its last token is always computed).
fn saved_by_an_infinite_cache(rows: &[Row]) -> u64 {
    let block_tokens = (BLOCK_BYTES / BYTES_PER_TOKEN) as u64;
    let mut seen: HashSet<u64> = HashSet::new();
    rows.iter()
        .map(|row| {
            let known = row.hash_ids.iter().take_while(|id| seen.contains(id)).count();
            seen.extend(&row.hash_ids);
            let last = if known == row.hash_ids.len() { u64::from(BLOCK_TOKENS) } else { 0 };
            known as u64 * block_tokens - last
        })
        .sum()
}

/// Time-outs are not the point here, and a machine that is busy with other things must not meet them.
const NEVER: Duration = Duration::from_mins(5);

fn timed(config: EngineConfig) -> EngineConfig {
    config.keep_alive(NEVER).lease(NEVER).timing(Timing {
        prefill_base: Duration::from_millis(1),
        prefill_tokens_per_second: 24_000.0,
        decode_base: Duration::from_millis(25),
        decode_per_sequence: Duration::from_millis(3),
        transfer_base: Duration::from_millis(1),
        ..Timing::instant()
    })
}

/// A run of the trace, for those who watch it.
#[derive(Clone, Debug)]
struct Progress {
    /// Requests that have been sent. They are sent in the order of the trace.
    sent: Arc<AtomicUsize>,
    /// Whether each has its whole answer.
    answered: Arc<watch::Sender<Vec<bool>>>,
}

impl Progress {
    fn new(requests: usize) -> Progress {
        let answered = Arc::new(watch::Sender::new(vec![false; requests]));
        Progress { sent: Arc::default(), answered }
    }

    fn sent(&self) -> usize {
        self.sent.load(Ordering::SeqCst)
    }

    /// Waits until that many answers are complete.
    async fn answers(&self, count: usize) {
        let mut answered = self.answered.subscribe();
        let enough = |answered: &Vec<bool>| answered.iter().filter(|done| **done).count() >= count;
        let _ = within_time(NEVER, "answers", answered.wait_for(enough)).await.expect("the run");
    }

    /// Waits until everything that was sent before now is answered.
    async fn answers_so_far(&self) {
        let sent = self.sent();
        let mut answered = self.answered.subscribe();
        let all = |answered: &Vec<bool>| answered[..sent].iter().all(|done| *done);
        let _ = within_time(NEVER, "answers so far", answered.wait_for(all)).await.expect("the run");
    }
}

/// Sends the trace and returns what went wrong.
async fn replay(base: String, rows: &[Row], progress: &Progress) -> Vec<String> {
    let start = Instant::now();
    let mut running = JoinSet::new();
    let room = Arc::new(Semaphore::new(MOST_IN_FLIGHT));
    for (number, row) in rows.iter().enumerate() {
        tokio::time::sleep_until(start + row.due()).await;
        let permit = Arc::clone(&room).acquire_owned().await.expect("room");
        let (call, stream, output) = (request(&base, row, number), streamed(number), row.output());
        progress.sent.fetch_add(1, Ordering::SeqCst);
        let progress = progress.clone();
        running.spawn(async move {
            let verdict = judge(call, stream, output).await;
            drop(permit);
            progress.answered.send_modify(|answered| answered[number] = true);
            verdict.err().map(|text| format!("request {number}: {text}"))
        });
    }
    running.join_all().await.into_iter().flatten().collect()
}

/// Every fourth request is streamed: chunks are what costs, and they are not the point.
fn streamed(number: usize) -> bool {
    number.is_multiple_of(4)
}

fn request(base: &str, row: &Row, number: usize) -> Call {
    let mut body = json!({"model": MODEL, "prompt": row.prompt(), "max_tokens": row.output()});
    if streamed(number) {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    Call::post(base, "/v1/completions", body.to_string())
}

/// What a client expects: 200, all of it, and the tokens that it asked for.
async fn judge(call: Call, stream: bool, output: u32) -> Result<(), String> {
    let answer = within_time(NEVER, "answer", call.try_send()).await.map_err(|e| e.to_string())?;
    let status = answer.status;
    let body = answer.body().await;
    let text = String::from_utf8_lossy(&body.bytes);
    if status != 200 || !body.complete {
        return Err(format!("{status}, complete: {}: {text}", body.complete));
    }
    let usage = if stream {
        if !text.trim_end().ends_with("data: [DONE]") {
            return Err(format!("no end: {text}"));
        }
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        events.map(|event| event["usage"]["completion_tokens"].clone()).rfind(|usage| !usage.is_null())
    } else {
        serde_json::from_str::<Value>(&text).ok().map(|answer| answer["usage"]["completion_tokens"].clone())
    };
    if usage == Some(output.into()) { Ok(()) } else { Err(format!("usage {usage:?}, not {output}: {text}")) }
}

/// Replicas and an Envoy that wait as long as it takes. Scrapes are four times as rare as by default: eight pages, twenty
/// times a second, would cost more than the trace.
async fn start_fleet(replicas: usize, pairs: &[Pair], config: &Value) -> Fleet {
    let env = [("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "200"), ("AIBRIX_PREFILL_REQUEST_TIMEOUT", "300")]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let options = FleetOptions { replicas, front: false, envoy: false, env: env.to_vec(), ..FleetOptions::default() };
    let mut fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(config)), options).await;
    let patient: fn(&mut Value) = |config| {
        let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
        manager["http_filters"][0]["typed_config"]["message_timeout"] = "300s".into();
    };
    let options = EnvoyOptions {
        failover: None,
        tandem_grpc: fleet.tandems.iter().map(Tandem::grpc).collect(),
        tandem_http: fleet.tandems[0].http(),
        healthy: None,
        otel: None,
        edit: Some(patient),
    };
    fleet.envoy = Some(Envoy::start_with(options).await);
    fleet
}

/// Fails with what clients saw and what Envoy noted.
fn nobody_failed(fleet: &Fleet, failures: &[String]) {
    let log = fleet.envoy.as_ref().map(Envoy::access_log).unwrap_or_default();
    let noted: Vec<String> = log.iter().filter(|line| line["status"] != 200).map(Value::to_string).collect();
    assert!(
        failures.is_empty(),
        "{} failures: {:#?}\n{}",
        failures.len(),
        &failures[..failures.len().min(5)],
        noted.join("\n")
    );
}

async fn start_pairs(numbers: std::ops::Range<usize>) -> Vec<Pair> {
    let mut pairs = Vec::new();
    for number in numbers {
        pairs.push(Pair::start(number, MODEL, timed).await);
    }
    pairs
}

/// The index of prefixes is each replica's own so far: one replica.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_trace_finds_its_prefixes() {
    let rows = rows();
    assert_eq!(rows.len(), 500);
    let pairs = start_pairs(0..4).await;
    let fleet = start_fleet(1, &pairs, &pd_by_default()).await;
    let envoy = fleet.envoy.as_ref().expect("envoy").base();
    let start = Instant::now();
    let failures = replay(envoy, &rows, &Progress::new(rows.len())).await;
    let took = start.elapsed();
    nobody_failed(&fleet, &failures);
    settle_pairs(&fleet, &pairs).await;

    let sum = |value: fn(&Engine) -> u64| pairs.iter().map(|pair| value(&pair.prefill)).sum::<u64>();
    let (hits, computed) = (sum(|p| p.stats().cache_hit_tokens), sum(|p| p.stats().computed_tokens));
    let best = saved_by_an_infinite_cache(&rows);
    let share = hits as f64 / best as f64;
    println!("{hits} of {best} prefix tokens found ({:.1} %), {computed} computed, in {took:?}", share * 100.0);
    let all: u64 = rows.iter().map(|row| (row.hash_ids.len() * BLOCK_BYTES / BYTES_PER_TOKEN) as u64).sum();
    assert_eq!(hits + computed, all, "each prompt was prefilled once");
    // The last request comes after 16.5 s and may take seven. On a machine too busy for that pace the engines' times are
    // not what the gateway weighs any more, and it rightly prefers an idle pair to a cached prefix more often.
    let least = if took < Duration::from_secs(30) { 0.8 } else { 0.65 };
    assert!(share >= least, "{share:.3} of what an infinite cache would have found, in {took:?}");
    for pair in &pairs {
        let decode = pair.decode.stats();
        assert_eq!((decode.computed_tokens, decode.errors, decode.failed_transfers), (0, 0, 0), "d{}", pair.number);
        assert_eq!(pair.prefill.stats().pinned_requests, 0, "all KV was pulled from p{}", pair.number);
    }
}

/// Rolesets join, drain by their deletion timestamp, and vanish from the file; engines stop as soon as they are
/// idle. No client notices.
#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_changes_under_a_replayed_trace() {
    let rows = rows();
    // Whoever joins has no throughput yet, which `load_balancing` holds against it as long as the others are not loaded:
    // count requests, so that the new ones get some.
    let config = json!({"profiles": {"default": {
        "routingStrategy": "pd", "routingConfig": {"decodeScorePolicy": "least_request"}}}});
    let mut pairs = start_pairs(0..4).await;
    let mut fleet = start_fleet(2, &pairs, &config).await;
    let envoy = fleet.envoy.as_ref().expect("envoy").base();
    let progress = Progress::new(rows.len());
    let run = {
        let (rows, progress) = (rows.clone(), progress.clone());
        tokio::spawn(async move { replay(envoy, &rows, &progress).await })
    };

    progress.answers(40).await;
    join(&mut fleet, &mut pairs, &config).await;

    // Roleset 0 is told to go, as Kubernetes does it.
    progress.answers(80).await;
    for name in ["p0", "d0"] {
        fleet.pods.change(name, super::PodManifest::terminating);
    }
    routable(&fleet.tandems, &["p1", "d1", "p2", "d2", "p3", "d3", "p4", "d4"]).await;
    progress.answers_so_far().await;
    for name in ["default/p0", "default/d0"] {
        fleet_shows(&fleet.tandems, "the terminating pods are idle", |page| {
            let in_flight = &pod_of(page, name).expect("still known")["in_flight"];
            ["prefills", "decodes_pending", "decodes_running"].iter().all(|count| in_flight[*count] == 0)
        })
        .await;
    }
    stop(&pairs[0]).await;
    for name in ["p0", "d0"] {
        fleet.pods.remove(name);
    }
    join(&mut fleet, &mut pairs, &config).await;

    // Roleset 1 is gone from one look at the file to the next.
    for name in ["p1", "d1"] {
        fleet.pods.remove(name);
    }
    routable(&fleet.tandems, &["p2", "d2", "p3", "d3", "p4", "d4", "p5", "d5"]).await;
    progress.answers_so_far().await;
    stop(&pairs[1]).await;

    let failures = run.await.expect("the run");
    nobody_failed(&fleet, &failures);
    for pair in &pairs {
        assert!(pair.prefill.stats().finished > 0, "p{} took part", pair.number);
        assert!(pair.decode.stats().finished > 0, "d{} took part", pair.number);
    }
    let engines: Vec<&Engine> = pairs.iter().flat_map(Pair::engines).collect();
    settle(&fleet.tandems, &engines).await;
}

async fn join(fleet: &mut Fleet, pairs: &mut Vec<Pair>, config: &Value) {
    let pair = Pair::start(pairs.len(), MODEL, timed).await;
    fleet.pods.put(pair.pods(config));
    pairs.push(pair);
}

/// Stops both engines, which must be idle.
async fn stop(pair: &Pair) {
    for engine in pair.engines() {
        assert_eq!(engine.stats().live_requests, 0, "pair {}: everything that was routed there has ended", pair.number);
        within(&format!("pair {} stops", pair.number), engine.stop()).await;
    }
}

#[test]
fn the_scaled_trace_shares_prefixes_as_the_trace_does() {
    let rows = rows();
    assert_eq!(rows.iter().map(|row| row.hash_ids.len()).sum::<usize>(), 14_162);
    assert_eq!(rows.last().expect("rows").due(), Duration::from_millis(16_500));
    assert_eq!(block(7), block(7));
    assert_ne!(block(7), block(8));
    let first = rows[0].prompt();
    assert_eq!(first.len(), rows[0].hash_ids.len() * BLOCK_BYTES);
    assert_eq!(first[..BLOCK_BYTES], rows[1].prompt()[..BLOCK_BYTES]);
    let row = |ids: &[u64]| Row { timestamp: 0, output_length: 1, hash_ids: ids.to_vec() };
    // Two of three blocks; all of two blocks less the last 16 tokens; a gap ends the match.
    assert_eq!(saved_by_an_infinite_cache(&[row(&[1, 2, 3]), row(&[1, 2, 4])]), 128);
    assert_eq!(saved_by_an_infinite_cache(&[row(&[1, 2]), row(&[1, 2])]), 112);
    assert_eq!(saved_by_an_infinite_cache(&[row(&[1, 2, 3]), row(&[1, 4, 3])]), 64);
}
