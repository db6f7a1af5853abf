//! Plays one cell and notes what could be seen.

use std::time::Duration;

use http::HeaderMap;
use serde_json::Value;
use tandem_sim::{End, Engine, Record};
use tokio::sync::watch;
use tokio::time::Instant;

use super::cells::{Cell, ENGINE_FAILS, ENGINE_REFUSES, Fault, Leg};
use super::rules::Way;
use super::stage::{PREFILL_TIMEOUT, Stage, WATCHDOG, arrives, records};
use crate::harness::http::{Call, first_event};
use crate::harness::within;

/// More than any gateway needs for saying what it knows; a machine that is busy with other things gets another try.
const AT_ONCE: Duration = Duration::from_millis(100);

/// `delayed_close_timeout` of the shipped file.
const ENVOY_CLOSES_AFTER: Duration = Duration::from_millis(250);

/// What a client saw.
#[derive(Debug)]
pub struct Seen {
    pub start: Instant,
    /// The answer's end, or when the client left.
    pub over: Instant,
    /// None: no answer began.
    pub status: Option<u16>,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    /// The answer ended as HTTP answers end.
    pub complete: bool,
}

/// What an engine got of a cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub requests: usize,
    pub aborts: usize,
    /// Requests that the gateway ended: it closed their connection, or an abort ended them.
    pub stopped: usize,
}

/// A played cell.
#[derive(Debug)]
pub struct Played {
    pub cell: Cell,
    pub tag: String,
    pub way: Way,
    pub seen: Seen,
}

/// What came of it.
#[derive(Debug)]
pub struct Outcome {
    pub cell: Cell,
    pub seen: Seen,
    /// In words.
    pub sees: String,
    /// In words; see [`Outcome::is_late`].
    pub when: String,
    pub prefill: Traffic,
    pub decode: Traffic,
}

/// How far the client is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Nothing,
    Head,
    Body,
}

/// Plays `cell`; `tag` is its own.
pub async fn play(stage: &Stage, way: Way, cell: Cell, tag: String) -> Played {
    let engine = if cell.leg == Leg::Prefill { &stage.prefill } else { &stage.decode };
    if let Some(script) = cell.script(&tag) {
        engine.script(script);
    }
    let base = &stage.fleet.paths()[way as usize];
    let call = Call::post(base, "/v1/chat/completions", cell.body())
        .header("x-cell", &tag)
        .header("external-filter", &format!("lane={}", cell.lane()));
    let mut seen = Seen {
        start: Instant::now(),
        over: Instant::now(),
        status: None,
        headers: HeaderMap::new(),
        body: Vec::new(),
        complete: false,
    };
    let progress = watch::Sender::new(Progress::Nothing);
    if cell.leaves {
        let asked = ask(call, &mut seen, &progress);
        tokio::select! {
            // Both at once is no accident that could be: the fault lasts far longer than this takes.
            () = within("the answer of a client that leaves", asked) => panic!("{tag}: answered before the client left"),
            () = within("the moment to leave", moment(stage, cell, &tag, &progress)) => {}
        }
        // Its connection is closed now.
        seen.over = Instant::now();
        for engine in stage.engines() {
            within(&format!("{tag}: the end of a leg"), engine.wait_until(|engine| all_ended(engine, &tag))).await;
        }
    } else {
        within(&tag, ask(call, &mut seen, &progress)).await;
        seen.over = Instant::now();
    }
    Played { cell, tag, way, seen }
}

fn all_ended(engine: &Engine, tag: &str) -> bool {
    records(engine, tag).iter().all(|record| record.end.is_some())
}

async fn ask(call: Call, seen: &mut Seen, progress: &watch::Sender<Progress>) {
    let Ok(mut answer) = call.try_send().await else { return };
    seen.status = Some(answer.status.as_u16());
    seen.headers = answer.headers.clone();
    progress.send_replace(Progress::Head);
    loop {
        match answer.chunk().await {
            Some(Ok(data)) => seen.body.extend_from_slice(&data),
            Some(Err(_)) => return,
            None => break,
        }
        progress.send_replace(Progress::Body);
    }
    seen.complete = true;
}

/// The fault has begun, and the other leg is out too where both are sent at once.
async fn moment(stage: &Stage, cell: Cell, tag: &str, progress: &watch::Sender<Progress>) {
    let has_arrived = |record: &Record| record.body_length > 0;
    let has_begun = |record: &Record| record.status.is_some();
    let faulty = if cell.leg == Leg::Prefill { &stage.prefill } else { &stage.decode };
    match cell.fault {
        Fault::HangBeforeHead => arrives(faulty, tag, has_arrived).await,
        _ => arrives(faulty, tag, has_begun).await,
    }
    if cell.dialect.is_concurrent() {
        arrives(&stage.prefill, tag, has_arrived).await;
        arrives(&stage.decode, tag, has_arrived).await;
    }
    if cell.leg == Leg::Decode && matches!(cell.fault, Fault::HangInBody | Fault::SlowBytes) {
        let mut progress = progress.subscribe();
        progress.wait_for(|progress| *progress == Progress::Body).await.expect("the sender is there");
    }
}

impl Played {
    /// Reads the records. Call it when nothing more can come.
    pub fn judge(self, stage: &Stage) -> Outcome {
        let Played { cell, tag, way, seen } = self;
        let [prefill, decode] = stage.engines().map(|engine| records(engine, &tag));
        let rids: Vec<String> = prefill.iter().chain(&decode).filter_map(|record| rid(&record.json())).collect();
        let aborts = stage.engines().map(|engine| {
            let own = |record: &Record| rid(&record.json()).is_some_and(|rid| rids.contains(&rid));
            engine.records_for("/abort_request").into_iter().filter(own).collect::<Vec<_>>()
        });
        let [prefill, decode] = [Heard::new(prefill, &aborts[0]), Heard::new(decode, &aborts[1])];
        let when = if cell.leaves {
            when_engines_knew(&seen, [&prefill, &decode])
        } else {
            when_client_knew(way, &seen, [&prefill, &decode])
        };
        let sees = if cell.leaves { "–".to_owned() } else { sees(cell, &seen) };
        Outcome { cell, seen, sees, when, prefill: prefill.traffic, decode: decode.traffic }
    }
}

fn rid(body: &Value) -> Option<String> {
    body["rid"].as_str().map(str::to_owned)
}

/// What one engine heard of a cell.
struct Heard {
    traffic: Traffic,
    legs: Vec<Record>,
    first_abort: Option<Instant>,
}

impl Heard {
    fn new(legs: Vec<Record>, aborts: &[Record]) -> Heard {
        let stopped = |record: &&Record| match record.ended() {
            Some(End::ClientGone) => true,
            Some(End::Completed) => !aborts.is_empty(),
            _ => false,
        };
        let traffic =
            Traffic { requests: legs.len(), aborts: aborts.len(), stopped: legs.iter().filter(stopped).count() };
        Heard { traffic, legs, first_abort: aborts.first().map(|record| record.received_at) }
    }

    /// When the engine said its last word to the gateway, before `then`. What it says after an abort is no news.
    fn said(&self, then: Instant) -> Option<Instant> {
        let ends = self.legs.iter().filter_map(|record| record.end);
        let aborted = |at: Instant| self.first_abort.is_some_and(|abort| abort <= at);
        ends.filter(|(at, end)| *end != End::ClientGone && *at <= then && !aborted(*at)).map(|(at, _)| at).max()
    }

    /// When it knew that nobody waits any more.
    fn knew(&self) -> Option<Instant> {
        let ended = self.legs.iter().filter_map(|record| record.end).map(|(at, _)| at).max()?;
        Some(self.first_abort.map_or(ended, |abort| abort.min(ended)))
    }

    /// The gateway hung up around `then`, when a leg had lasted as long as `timer`.
    fn ran_out(&self, timer: Duration, then: Instant) -> bool {
        self.legs.iter().any(|record| {
            let Some((at, End::ClientGone)) = record.end else { return false };
            at - record.received_at >= timer.checked_sub(timer / 20).unwrap()
                && at < then + AT_ONCE
                && then.saturating_duration_since(at) < BUSY_MOMENT
        })
    }
}

/// What a busy machine may add to a timer.
const BUSY_MOMENT: Duration = Duration::from_millis(1500);

impl Outcome {
    /// It took longer than anything that is due to take time.
    pub fn is_late(&self) -> bool {
        self.when.starts_with("late")
    }
}

/// From the last word of an engine, or from the start, to the end of the answer.
fn when_client_knew(way: Way, seen: &Seen, heard: [&Heard; 2]) -> String {
    // Envoy closes a client's connection a moment after it has broken an answer off.
    let cut = way == Way::Envoy && seen.status.is_some() && !seen.complete;
    let knew = if cut { seen.over - ENVOY_CLOSES_AFTER.min(seen.over - seen.start) } else { seen.over };
    let said = heard.iter().filter_map(|heard| heard.said(knew)).max().unwrap_or(seen.start);
    if knew - said < AT_ONCE {
        "at once".to_owned()
    } else if heard[0].ran_out(PREFILL_TIMEOUT, knew) {
        "prefill timeout".to_owned()
    } else if heard[1].ran_out(WATCHDOG, knew) {
        "watchdog".to_owned()
    } else {
        format!("late: {:?} of {:?}", knew - said, knew - seen.start)
    }
}

/// From the client's leaving until the last engine knew.
fn when_engines_knew(seen: &Seen, heard: [&Heard; 2]) -> String {
    let knew = heard.iter().filter_map(|heard| heard.knew()).max().unwrap_or(seen.over);
    let took = knew.saturating_duration_since(seen.over);
    if took < AT_ONCE { "at once".to_owned() } else { format!("late: {took:?}") }
}

/// What the client sees, in words.
fn sees(cell: Cell, seen: &Seen) -> String {
    let Some(status) = seen.status else { return "connection closed".to_owned() };
    let text = String::from_utf8_lossy(&seen.body);
    if status != 200 {
        let error: Value = serde_json::from_slice(&seen.body).unwrap_or_default();
        let who = match (seen.marker("x-error-pd-prefill"), seen.marker("x-error-pd-decode")) {
            (true, _) => " P",
            (_, true) => " D",
            _ => "",
        };
        let cut = if seen.complete { "" } else { ", cut" };
        return format!("{status}{who}: {}{cut}", words(error["error"]["message"].as_str().unwrap_or(&text)));
    }
    let end = if seen.complete { "" } else { ", cut" };
    if !cell.stream || !seen.headers.get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"text/event"))
    {
        let read = serde_json::from_slice::<Value>(&seen.body);
        return match read {
            Ok(value) if value["choices"][0]["message"]["content"].is_string() => format!("200, answer{end}"),
            _ if !seen.complete => "200, cut".to_owned(),
            _ => "200, what the engine wrote".to_owned(),
        };
    }
    let events = seen.events();
    let mut parts = vec!["200"];
    if content(&events) {
        parts.push("content");
    }
    if events.iter().any(|event| event.contains("\"error\"")) {
        parts.push("error event");
    }
    if events.iter().any(|event| event == "[DONE]") {
        parts.push("`[DONE]`");
    }
    // Behind an error event, whether there is a cut or just an end depends on how the engine's writes fell into Envoy's reads.
    if !seen.complete && !parts.contains(&"error event") {
        parts.push("cut");
    }
    parts.join(", ")
}

/// Something was generated.
pub fn content(events: &[String]) -> bool {
    events.iter().any(|event| {
        let event: Value = serde_json::from_str(event).unwrap_or_default();
        event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty())
    })
}

/// A message without what changes from run to run.
fn words(message: &str) -> String {
    if let Some((class, said)) =
        message.strip_prefix("prefill request failed (").and_then(|rest| rest.split_once("): "))
    {
        let said = if said == ENGINE_REFUSES || said == ENGINE_FAILS { ", the engine's words" } else { "" };
        return format!("prefill failed, `{class}`{said}");
    }
    match message {
        ENGINE_REFUSES | ENGINE_FAILS => "the engine's words".to_owned(),
        _ if message.contains("responding within") => "decode watchdog".to_owned(),
        _ if message.starts_with("the server behind the proxy") => "Envoy's own".to_owned(),
        _ => message.chars().take(70).collect(),
    }
}

impl Seen {
    pub fn marker(&self, name: &str) -> bool {
        self.headers.get(name).is_some_and(|value| value == "true")
    }

    /// The events of a stream.
    pub fn events(&self) -> Vec<String> {
        let (mut events, mut rest) = (Vec::new(), &self.body[..]);
        while let Some((event, used)) = first_event(rest) {
            events.extend(event);
            rest = &rest[used..];
        }
        events
    }
}
