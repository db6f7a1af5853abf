//! Plays one cell and notes what could be seen.

use std::time::Duration;

use http::HeaderMap;
use serde_json::Value;
use tandem_sim::{End, Engine, Record};
use tokio::sync::watch;
use tokio::time::Instant;

use super::cells::{Cell, ENGINE_FAILS, ENGINE_REFUSES, Fault, Leg};
use super::stage::{PREFILL_TIMEOUT, Stage, WATCHDOG, arrives, records};
use crate::harness::http::{Call, first_event};
use crate::harness::within;

/// More than any gateway needs for saying what it knows; a machine that is busy with other things gets another try.
const AT_ONCE: Duration = Duration::from_millis(100);

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
    /// Requests whose connection was closed on the engine.
    pub hung_up: usize,
}

/// A played cell.
#[derive(Debug)]
pub struct Played {
    pub cell: Cell,
    pub tag: String,
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
pub async fn play(stage: &Stage, base: &str, cell: Cell, tag: String) -> Played {
    let engine = if cell.leg == Leg::Prefill { &stage.prefill } else { &stage.decode };
    if let Some(script) = cell.script(&tag) {
        engine.script(script);
    }
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
    Played { cell, tag, seen }
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
        let Played { cell, tag, seen } = self;
        let legs = [&stage.prefill, &stage.decode].map(|engine| records(engine, &tag));
        let rids: Vec<String> = legs.iter().flatten().filter_map(|record| rid(&record.json())).collect();
        let traffic = |engine: &Engine, legs: &[Record]| Traffic {
            requests: legs.len(),
            aborts: engine
                .records_for("/abort_request")
                .iter()
                .filter(|record| rid(&record.json()).is_some_and(|rid| rids.contains(&rid)))
                .count(),
            hung_up: legs.iter().filter(|record| record.ended() == Some(End::ClientGone)).count(),
        };
        let [prefill, decode] = [(&stage.prefill, &legs[0]), (&stage.decode, &legs[1])].map(|(e, l)| traffic(e, l));
        let ends: Vec<(Instant, End)> = legs.iter().flatten().filter_map(|record| record.end).collect();
        let when = if cell.leaves { when_engines_knew(&seen, &ends) } else { when_client_knew(&seen, &ends) };
        let sees = if cell.leaves { "–".to_owned() } else { sees(cell, &seen) };
        Outcome { cell, seen, sees, when, prefill, decode }
    }
}

fn rid(body: &Value) -> Option<String> {
    body["rid"].as_str().map(str::to_owned)
}

impl Outcome {
    /// It took longer than anything that is due to take time.
    pub fn is_late(&self) -> bool {
        self.when.starts_with("late")
    }
}

/// From the last word of an engine, or from the start, to the end of the answer.
fn when_client_knew(seen: &Seen, ends: &[(Instant, End)]) -> String {
    let said = ends.iter().filter(|(at, end)| *end != End::ClientGone && *at <= seen.over).map(|(at, _)| *at);
    let heard = said.max().unwrap_or(seen.start);
    class(seen.over - heard, seen.over - seen.start)
}

/// From the client's leaving to the end of the last leg.
fn when_engines_knew(seen: &Seen, ends: &[(Instant, End)]) -> String {
    let last = ends.iter().map(|(at, _)| *at).max().unwrap_or(seen.over);
    class(last.saturating_duration_since(seen.over), last.saturating_duration_since(seen.start))
}

fn class(since: Duration, total: Duration) -> String {
    let about = |timer: Duration| (timer - timer / 20..timer + Duration::from_millis(1500)).contains(&total);
    if since < AT_ONCE {
        "at once".to_owned()
    } else if about(PREFILL_TIMEOUT) {
        "prefill timeout".to_owned()
    } else if about(WATCHDOG) {
        "watchdog".to_owned()
    } else {
        format!("late: {since:?} of {total:?}")
    }
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
    if !cell.stream || !seen.headers.get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"text/event")) {
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
    if !seen.complete {
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
    if let Some((class, said)) = message.strip_prefix("prefill request failed (").and_then(|rest| rest.split_once("): ")) {
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
