//! What a request and a streamed chunk cost: `cargo bench --bench hot_path [FILTER]`.
//!
//! Prints the best and the median time of one call over many rounds. The best is what the work costs on a machine that
//! does nothing else; compare two versions by it.
#![allow(missing_docs, clippy::unwrap_used, clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use tandem::clock::Tick;
use tandem::engines::leg::LegOutcome;
use tandem::engines::vllm;
use tandem::exchange::{Adapter, AnswerHead, Effect, Event, Exchange, RequestHead, World, WorldSeeds};
use tandem::fleet::{Engine, Fleet, PodKey, PodSpec, Role, Snapshot, build};
use tandem::knobs::{Environment, Knobs, KvConnector};
use tandem::prefix::block_hashes;
use tandem::request::{Endpoint, ParsedBody};
use tandem::response::{AnswerKind, AnswerWatch, Api};
use tandem::telemetry::Metrics;

/// Rounds of one measurement.
const ROUNDS: usize = 41;
/// Time of one round.
const ROUND: Duration = Duration::from_millis(20);

/// Runs measurements whose name contains the argument, if there is one.
struct Bench {
    filter: Option<String>,
}

impl Bench {
    /// Measures one call, which does `units` units of work; returns the best time of one unit.
    fn measure(&self, name: &str, unit: &str, units: u32, mut call: impl FnMut()) -> Option<Duration> {
        if self.filter.as_ref().is_some_and(|filter| !name.contains(filter.as_str())) {
            return None;
        }
        let mut calls = 1_u32;
        loop {
            let took = time(calls, &mut call);
            if took >= ROUND {
                break;
            }
            calls = calls.saturating_mul(2);
        }
        let mut times: Vec<f64> =
            (0..ROUNDS).map(|_| time(calls, &mut call).as_secs_f64() / f64::from(calls) / f64::from(units)).collect();
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[ROUNDS / 2]);
        println!("{name:<52} best {:>9.1} ns  median {:>9.1} ns  per {unit}", best * 1e9, median * 1e9);
        Some(Duration::from_secs_f64(best))
    }
}

fn time(calls: u32, call: &mut impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        call();
    }
    start.elapsed()
}

fn main() {
    // `cargo bench` passes `--bench`.
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let bench = Bench { filter };
    chunks(&bench);
    bodies(&bench);
    requests(&bench);
}

/// One streamed token, as vLLM sends it.
fn token_event(text: &str, usage: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-9b2f1c7a5d3e4f60b1a2c3d4e5f60718\",\"object\":\"chat.completion.chunk\",\
         \"created\":1763817600,\"model\":\"meta-llama/Llama-3.1-8B-Instruct\",\"choices\":[{{\"index\":0,\
         \"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}]{usage}}}\n\n"
    )
}

/// R22: the price of a streamed chunk next to that of a substring scan.
fn chunks(bench: &Bench) {
    const CHUNKS: u32 = 1000;
    let stream = |usage: &str| -> Vec<String> {
        (0..CHUNKS).map(|i| token_event([" the", " quick", " brown", " fox,", "\\n"][i as usize % 5], usage)).collect()
    };
    let plain = stream("");
    let halves: Vec<String> = plain
        .iter()
        .flat_map(|event| {
            let (one, other) = event.split_at(event.len() / 2);
            [one.to_owned(), other.to_owned()]
        })
        .collect();
    let finder = memchr::memmem::Finder::new("\"usage\"");
    let scan = bench.measure("chunk: one substring scan, nothing else", "chunk", CHUNKS, || {
        for chunk in &plain {
            black_box(finder.find(black_box(chunk.as_bytes())));
        }
    });
    let watched = |name: &str, chunks: &[String], units: u32| {
        bench.measure(name, "chunk", units, || {
            let mut watch = AnswerWatch::new(AnswerKind::Stream, Api::OpenAi);
            for chunk in chunks {
                watch.feed(black_box(chunk.as_bytes()));
            }
            black_box(watch.usage());
        })
    };
    let watch = watched("chunk: watched", &plain, CHUNKS);
    watched("chunk: watched, events cut in halves", &halves, 2 * CHUNKS);
    watched("chunk: watched, \"usage\":null in each", &stream(",\"usage\":null"), CHUNKS);
    let usage = ",\"usage\":{\"prompt_tokens\":812,\"total_tokens\":1017,\"completion_tokens\":205}";
    watched("chunk: watched, usage in each", &stream(usage), CHUNKS);
    if let (Some(scan), Some(watch)) = (scan, watch) {
        let per_million = watch.as_secs_f64() * 1e6;
        let times = watch.as_secs_f64() / scan.as_secs_f64();
        println!("  a watched chunk costs {times:.1} scans; {per_million:.3} CPU-seconds per million chunks");
    }
}

/// A chat of about `bytes` bytes: tools, a history, text with escapes.
fn chat(bytes: usize) -> Bytes {
    let mut text = String::from(
        r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"max_tokens":256,"temperature":0.7,"tools":[{"type":"function","function":{"name":"lookup","parameters":{"type":"object","properties":{"key":{"type":"string"}}}}}],"messages":[{"role":"system","content":"You are brief."}"#,
    );
    let mut turn = 0;
    while text.len() + 700 < bytes.max(1000) {
        let role = ["user", "assistant"][turn % 2];
        let sentence = format!("Turn {turn}: a caf\u{e9}, \\\"quoted\\\" words and a\\nnew line. ");
        let _ = write!(text, r#",{{"role":"{role}","content":"{}"}}"#, sentence.repeat(10));
        turn += 1;
    }
    text.push_str(r#",{"role":"user","content":"And now?"}]}"#);
    Bytes::from(text)
}

const PREFILL_ANSWER: &[u8] = br#"{"id":"x","choices":[{"index":0,"text":"a"}],"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]],"remote_engine_id":"5f1c7a9e-0000-4000-8000-5d3e4f60b1a2","remote_request_id":"r","remote_host":"localhost","remote_port":5600,"tp_size":1},"usage":{"prompt_tokens":12,"completion_tokens":1,"total_tokens":13}}"#;

fn bodies(bench: &Bench) {
    for size in [48_000, 400_000] {
        let raw = chat(size);
        let kilobytes = raw.len() / 1000;
        let parse = || ParsedBody::parse(Endpoint::ChatCompletions, None, raw.clone()).unwrap();
        bench.measure(&format!("body {kilobytes} kB: serde_json, top level only"), "body", 1, || {
            let top: BTreeMap<&str, &serde_json::value::RawValue> = serde_json::from_slice(black_box(&raw)).unwrap();
            black_box(top.len());
        });
        bench.measure(&format!("body {kilobytes} kB: parse"), "body", 1, || {
            black_box(parse());
        });
        let parsed = parse();
        bench.measure(&format!("body {kilobytes} kB: both legs' bodies"), "body", 1, || {
            black_box(vllm::prefill_body(&parsed, KvConnector::Shfs));
            black_box(vllm::decode_body(&parsed, KvConnector::Shfs, PREFILL_ANSWER, "10.0.0.5").unwrap());
        });
        bench.measure(&format!("body {kilobytes} kB: block hashes"), "body", 1, || {
            black_box(block_hashes(black_box(&raw), 128, 1));
        });
    }
}

struct Nothing;

impl Environment for Nothing {
    fn get(&self, _name: &str) -> Option<String> {
        None
    }
}

fn spec(name: &str, role: Role) -> PodSpec {
    PodSpec {
        key: PodKey { namespace: Arc::from("ns"), name: Arc::from(name) },
        uid: Arc::from(format!("uid-{name}")),
        restarts: 0,
        model: Arc::from("m"),
        host: Arc::from("10.0.0.5"),
        port: 8000,
        metric_port: 8000,
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role,
        roleset: Some(Arc::from("rs")),
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(BTreeMap::new()),
        config: None,
        also: Vec::new(),
        claim: None,
    }
}

fn world() -> Arc<World> {
    let (knobs, _) = Knobs::read(&Nothing).unwrap();
    let fleet = Fleet::default();
    let specs: Vec<PodSpec> =
        (0..4).flat_map(|i| [spec(&format!("p{i}"), Role::Prefill), spec(&format!("d{i}"), Role::Decode)]).collect();
    fleet.store(build(&Snapshot::default(), &specs, &mut 0));
    Arc::new(World::new(
        Arc::new(knobs),
        Arc::new(fleet),
        Arc::new(Metrics::new("gateway")),
        WorldSeeds { hashes: 1, ..WorldSeeds::default() },
    ))
}

/// The head that Envoy hands over for an ordinary client.
fn head() -> RequestHead {
    let headers = [
        ("content-type", "application/json"),
        ("content-length", ""),
        ("user-agent", "OpenAI/Python 1.51.0"),
        ("accept", "application/json"),
        ("authorization", "Bearer sk-0123456789abcdef0123456789abcdef"),
        ("routing-strategy", "pd"),
        ("x-stainless-lang", "python"),
        ("x-stainless-os", "Linux"),
        ("x-forwarded-for", "10.1.2.3"),
        ("x-forwarded-proto", "http"),
        ("x-request-id", "4f8f7f2e-52cf-4a54-9d0e-0c8d2d3b4a11"),
    ];
    let headers: HeaderMap = headers
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect();
    RequestHead {
        request_id: "4f8f7f2e-52cf-4a54-9d0e-0c8d2d3b4a11".to_owned(),
        id_is_unique: true,
        method: Method::POST,
        path: "/v1/chat/completions".to_owned(),
        headers,
        end: false,
    }
}

/// The machine alone, from the head to the end: parse, select, charge, both bodies, answer, metrics record.
fn requests(bench: &Bench) {
    let world = world();
    let answer = AnswerHead {
        status: StatusCode::OK,
        headers: [(http::header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"))].into_iter().collect(),
        end: false,
    };
    let events: Vec<Bytes> = (0..20).map(|_| Bytes::from(token_event(" word", ""))).collect();
    for (size, chunks) in [(1_000, 0), (1_000, 20), (100_000, 20)] {
        let body = chat(size);
        let name = format!("request: PD, body {} kB, {chunks} chunks", body.len() / 1000);
        let mut time = 1;
        bench.measure(&name, "request", 1, || {
            time += 1;
            let now = Tick(time * 1_000_000);
            let mut exchange = Exchange::new(Arc::clone(&world), Adapter::Envoy, time, now);
            let mut effects = Vec::with_capacity(4);
            exchange.on(now, Event::Head(head()), &mut effects);
            exchange.on(now, Event::Body { data: body.clone(), end: true }, &mut effects);
            let prefill = LegOutcome::Answered {
                status: StatusCode::OK,
                advice: HeaderMap::new(),
                body: Bytes::from_static(PREFILL_ANSWER),
            };
            exchange.on(now, Event::Prefill(prefill), &mut effects);
            exchange.on(now, Event::AnswerHead(answer.clone()), &mut effects);
            for event in &events[..chunks] {
                effects.clear();
                exchange.on(now, Event::AnswerChunk { data: event.clone(), end: false }, &mut effects);
            }
            let done = Bytes::from_static(b"data: [DONE]\n\n");
            exchange.on(now, Event::AnswerChunk { data: done, end: true }, &mut effects);
            for effect in &effects {
                if let Effect::End(record) = effect {
                    world.metrics.finish(record, None);
                }
            }
            assert!(exchange.ended());
            while world.prefix.drain(now).more {}
        });
    }
}
