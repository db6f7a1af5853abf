//! Whoever dies, and whenever: within a second nothing is charged any more.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tandem_sim::{End, Engine, Fault, Hold};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::{Dice, Pair, ask, chat, engine_shows, routable, settle, settle_pairs, slow};
use crate::harness::engines::{MODEL, pd_by_default};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Answer, RawConnection};
use crate::harness::{SOON, eventually, within};

/// Requests that stand still in every phase, streamed and not.
struct Scene {
    /// Only a head has arrived; half a body has.
    uploads: Vec<RawConnection>,
    /// The prefill leg is held.
    prefilling: Vec<JoinHandle<anyhow::Result<Answer>>>,
    /// The decode pod is held before its answer's head.
    waiting: Vec<JoinHandle<anyhow::Result<Answer>>>,
    /// Half an answer is through.
    answering: Vec<Answer>,
    holds: [Hold; 2],
}

/// Requests in a scene.
const REQUESTS: f64 = 8.0;

/// The head of a request whose body is announced.
fn head(length: usize) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway.test\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n"
    )
}

fn send(path: &str, text: &str, stream: bool) -> JoinHandle<anyhow::Result<Answer>> {
    tokio::spawn(ask(path, chat(MODEL, text, 32, stream)).try_send())
}

impl Scene {
    async fn set(fleet: &Fleet, path: &str, pair: &Pair) -> Scene {
        let mut answering = Vec::new();
        for stream in [true, false] {
            // Three events of a stream; the first half of an answer that is no stream.
            pair.decode.script(Fault::on("/v1/").stall_after(if stream { 3 } else { 1 }));
            let mut answer = within("an answer", send(path, "stalls", stream)).await.expect("task").expect("a head");
            assert_eq!(answer.status, 200);
            answer.chunk().await.expect("a piece").expect("not cut");
            answering.push(answer);
        }
        let decode = pair.decode.hold();
        let waiting = vec![send(path, "waits", true), send(path, "waits as well", false)];
        within("two requests at the decode engine", decode.wait_for(2)).await;
        let prefill = pair.prefill.hold();
        let prefilling = vec![send(path, "prefills", true), send(path, "prefills as well", false)];
        within("two requests at the prefill engine", prefill.wait_for(2)).await;
        let body = chat(MODEL, "is never sent whole", 32, true);
        let mut uploads = Vec::new();
        for part in ["", &body[..body.len() / 2]] {
            let mut upload = RawConnection::open(path).await;
            upload.send((head(body.len()) + part).as_bytes()).await;
            uploads.push(upload);
        }
        let everybody = async || {
            let mut count = 0.0;
            for tandem in &fleet.tandems {
                count += tandem.metrics().await.sum("gateway_in_flight_requests", &[]);
            }
            (count == REQUESTS).then_some(())
        };
        eventually(SOON, "everybody is in flight", everybody).await;
        Scene { uploads, prefilling, waiting, answering, holds: [prefill, decode] }
    }

    /// All clients leave at once, with a reset or without.
    fn clients_die(self, reset: bool) -> [Hold; 2] {
        self.prefilling.iter().chain(&self.waiting).for_each(JoinHandle::abort);
        for upload in self.uploads {
            if reset {
                upload.reset();
            }
        }
        self.answering.into_iter().for_each(Answer::abandon);
        self.holds
    }

    /// Both engines die. What the clients then see, who have sent everything.
    async fn engines_die(self, pair: &Pair, markers: bool) {
        pair.decode.kill();
        for request in self.waiting {
            let answer = within("an answer", request).await.expect("task").expect("a head");
            assert_eq!(answer.status, 503);
            let marker = answer.header("x-error-pd-decode") == "true";
            assert_eq!(marker, markers, "Envoy answers for itself, the front has a marker: {:?}", answer.headers);
            let error = answer.json().await;
            assert!(error["error"]["message"].is_string(), "{error}");
        }
        for answer in self.answering {
            assert!(!answer.body().await.complete, "the client sees that its answer is cut");
        }
        pair.prefill.kill();
        for request in self.prefilling {
            let answer = within("an answer", request).await.expect("task").expect("a head");
            assert_eq!((answer.status.as_u16(), answer.header("x-error-pd-prefill")), (503, "true"));
            assert!(answer.json().await["error"]["message"].is_string());
        }
        drop(self.uploads);
        for engine in pair.engines() {
            within("the end of an engine", engine.ended()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r24_whoever_dies_in_whatever_phase_nothing_stays_charged() {
    let mut pairs = vec![Pair::start(0, MODEL, |config| config).await];
    let mut fleet = Fleet::start(pairs[0].pods(&pd_by_default()), FleetOptions::default()).await;
    let paths = fleet.paths();

    // Counters of engines only grow, so each scene has a pair of its own.
    for (path, reset) in paths.iter().zip([true, false]) {
        let pair = pairs.last().expect("a pair");
        let holds = Scene::set(&fleet, path, pair).await.clients_die(reset);
        settle(&fleet.tandems, &pair.engines()).await;
        drop(holds);
        let gone = pair.engines().map(|engine| engine.stats().clients_gone);
        assert_eq!(gone, [2, 4], "each leg was told through {path}");
        replace(&mut fleet, &mut pairs).await;
    }

    for (path, markers) in paths.iter().zip([false, true]) {
        let pair = pairs.last().expect("a pair");
        Scene::set(&fleet, path, pair).await.engines_die(pair, markers).await;
        settle(&fleet.tandems, &[]).await;
        replace(&mut fleet, &mut pairs).await;
    }

    let pair = pairs.last().expect("a pair");
    let scene = Scene::set(&fleet, &paths[0], pair).await;
    fleet.envoy.as_ref().expect("envoy").process().kill();
    settle(&fleet.tandems, &pair.engines()).await;
    assert_eq!(pair.engines().map(|engine| engine.stats().clients_gone), [2, 4]);
    scene.clients_die(true);
}

/// A new pair takes the place of the last one.
async fn replace(fleet: &mut Fleet, pairs: &mut Vec<Pair>) {
    let number = pairs.len();
    let pair = Pair::start(number, MODEL, |config| config).await;
    fleet.pods.put(pair.pods(&pd_by_default()));
    for letter in ["p", "d"] {
        fleet.pods.remove(&format!("{letter}{}", number - 1));
    }
    routable(&fleet.tandems, &[&format!("p{number}"), &format!("d{number}")]).await;
    pairs.push(pair);
}

/// Times that each phase is measured, and how long an engine may wait to hear of it, by its own clock. On a busy
/// machine a single measurement says little; the one in the middle is what counts.
const MEASUREMENTS: usize = 9;
const TOLD_WITHIN: Duration = Duration::from_millis(200);

#[tokio::test(flavor = "multi_thread")]
async fn r25_r28_an_abandoned_leg_is_closed_at_once() {
    let pairs = [Pair::start(0, MODEL, |config| config).await];
    let fleet = Fleet::start(pairs[0].pods(&pd_by_default()), FleetOptions::default()).await;
    for path in fleet.paths() {
        // A prefill leg of a stream (R25), a decode leg without a stream (R28).
        for (engine, stream) in [(&pairs[0].prefill, true), (&pairs[0].decode, false)] {
            let mut delays = Vec::new();
            for _ in 0..MEASUREMENTS {
                engine.clear_records();
                let hold = engine.hold();
                let request = send(&path, "somebody who will not wait", stream);
                within("a held leg", hold.wait_for(1)).await;
                let left_at = Instant::now();
                request.abort();
                let told = |engine: &Engine| engine.records().iter().any(|record| record.ended().is_some());
                engine_shows("the leg's end", engine, told).await;
                let (at, end) = engine.records()[0].end.expect("an end");
                assert_eq!(end, End::ClientGone);
                delays.push(at.saturating_duration_since(left_at));
            }
            delays.sort();
            let middle = delays[MEASUREMENTS / 2];
            assert!(middle <= TOLD_WITHIN, "{path}, stream: {stream}: {delays:?}");
        }
    }
    settle_pairs(&fleet, &pairs).await;
}

/// What a client does before it leaves.
async fn visit(path: &str, number: usize, dice: &mut Dice) {
    let body = chat(MODEL, &format!("visitor {number}"), 20, number.is_multiple_of(2));
    let request = head(body.len()) + &body;
    let head_length = request.len() - body.len();
    let mut connection = RawConnection::open(path).await;
    match dice.below(6) {
        0 => connection.send(&request.as_bytes()[..dice.below(head_length)]).await,
        1 => connection.send(&request.as_bytes()[..head_length + dice.below(body.len())]).await,
        2 | 3 => {
            connection.send(request.as_bytes()).await;
            // Somewhere between the arrival and the end: prefill takes 10 ms, the answer 60 ms.
            tokio::time::sleep(Duration::from_millis(dice.below(90) as u64)).await;
        }
        4 => {
            connection.send(request.as_bytes()).await;
            let enough = 1 + dice.below(3_000);
            connection.read_until(|bytes| bytes.len() >= enough || ended(bytes)).await;
        }
        _ => {
            connection.send(request.as_bytes()).await;
            let answer = connection.read_until(ended).await;
            let text = String::from_utf8_lossy(&answer);
            assert!(text.starts_with("HTTP/1.1 200 "), "visitor {number}: {text}");
        }
    }
    if dice.below(2) == 0 {
        connection.reset();
    }
}

/// A chunked answer is there to its last chunk, or one with a length to its last brace.
fn ended(bytes: &[u8]) -> bool {
    bytes.ends_with(b"\r\n0\r\n\r\n") || bytes.ends_with(b"}")
}

#[tokio::test(flavor = "multi_thread")]
async fn r24_five_hundred_clients_leave_at_random() {
    let timing = slow(Duration::from_millis(10), Duration::from_millis(3));
    let mut pairs = Vec::new();
    for number in 0..3 {
        pairs.push(Pair::start(number, MODEL, |config| config.timing(timing)).await);
    }
    let fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(&pd_by_default())), FleetOptions::default()).await;
    let paths = Arc::new(fleet.paths());
    let room = Arc::new(Semaphore::new(24));
    let mut visitors = JoinSet::new();
    for number in 0..500 {
        let (paths, room) = (Arc::clone(&paths), Arc::clone(&room));
        visitors.spawn(async move {
            let _permit = room.acquire().await.expect("room");
            let mut dice = Dice(number as u64);
            visit(&paths[dice.below(paths.len())], number, &mut dice).await;
        });
    }
    visitors.join_all().await;
    settle_pairs(&fleet, &pairs).await;
    // Service goes on.
    for path in fleet.paths() {
        let body = json!({"model": MODEL, "prompt": "after all that", "max_tokens": 2}).to_string();
        let answer = crate::harness::http::Call::post(&path, "/v1/completions", body).send().await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json().await["usage"]["completion_tokens"], 2);
    }
    settle_pairs(&fleet, &pairs).await;
}
