//! Who may use which library.

use super::{File, at, has_word, mentions, without_strings};

/// Modules that decide and do nothing else.
const PURE: [&str; 17] = [
    "request",
    "response",
    "routing",
    "exchange",
    "fleet/build",
    "load",
    "prefix",
    "bands",
    "rng",
    "replay",
    "state/codec",
    "state/keys",
    "state/ledger",
    "state/payload",
    "state/scripts",
    "state/time",
    "state/wire",
];

/// What a pure module may not know.
const IO: [&str; 12] = [
    "tokio",
    "tokio_util",
    "tokio_stream",
    "tonic",
    "tonic_health",
    "envoy_types",
    "fred",
    "kube",
    "k8s_openapi",
    "hyper",
    "hyper_util",
    "axum",
];

/// Types that tell the time, under whatever path.
const CLOCKS: [&str; 2] = ["Instant", "SystemTime"];

/// A library and the only modules that may use it.
const PLACES: [(&str, &[&str]); 15] = [
    ("fred", &["state/redis"]),
    ("bincode", &["state/codec"]),
    ("kube", &["discovery"]),
    ("k8s_openapi", &["discovery"]),
    // Connections to engines need Tower's trait, which tonic hands on.
    ("tonic", &["ext_proc", "app", "telemetry/trace", "http_client"]),
    ("tonic_health", &["ext_proc", "app"]),
    ("envoy_types", &["ext_proc"]),
    ("axum", &["admin", "front", "app"]),
    ("hyper_util::client", &["http_client", "telemetry/trace/collector", "tls/dial"]),
    ("hyper::client", &["http_client"]),
    ("opentelemetry_otlp", &["telemetry/trace"]),
    ("opentelemetry_http", &["telemetry/trace"]),
    // One place knows how certificates are read, one how a collector is reached.
    ("tokio_rustls", &["tls", "telemetry/trace/collector"]),
    ("rustls_native_certs", &["tls"]),
    ("prometheus", &["telemetry"]),
];

/// A call and the only file that may make it, with the reason.
const DOORS: [(&str, &str, &str); 8] = [
    ("env::var", "knobs/env.rs", "the environment is read in one file"),
    ("env::var_os", "knobs/env.rs", "the environment is read in one file"),
    ("env::vars", "knobs/env.rs", "the environment is read in one file"),
    ("env::vars_os", "knobs/env.rs", "the environment is read in one file"),
    ("Instant::now", "clock.rs", "time is an argument"),
    ("SystemTime::now", "clock.rs", "time is an argument"),
    ("tokio::spawn", "", "tasks start through the tracker, or shutdown cannot wait for them"),
    ("task::spawn", "", "tasks start through the tracker, or shutdown cannot wait for them"),
];

/// Pure modules use no I/O and no clock.
pub fn pure_modules(files: &[File]) -> Vec<String> {
    let pure = files.iter().filter(|file| file.in_src() && PURE.iter().any(|module| file.belongs_to(module)));
    let mut broken = found(pure.clone(), |_| IO.to_vec(), |library| format!("a pure module uses {library}"));
    for file in pure {
        for (line, text) in file.code() {
            let clocks = CLOCKS.iter().filter(|clock| has_word(text, clock));
            broken.extend(clocks.map(|clock| at(file, line, &format!("a pure module uses {clock}"))));
        }
    }
    broken
}

/// Libraries stay where they belong.
pub fn libraries(files: &[File]) -> Vec<String> {
    let strangers = |file: &File| {
        let stranger = |(_, places): &&(&str, &[&str])| !places.iter().any(|place| file.belongs_to(place));
        PLACES.iter().filter(stranger).map(|(library, _)| *library).collect()
    };
    found(files.iter().filter(|file| file.in_src()), strangers, |library| format!("{library} has no business here"))
}

/// Calls that go through one place.
pub fn single_doors(files: &[File]) -> Vec<String> {
    let mut broken = Vec::new();
    for file in files.iter().filter(|file| file.in_src()) {
        for (line, text) in file.code() {
            for (call, home, reason) in DOORS {
                // The home of a call is one file, not a folder.
                if has_word(text, call) && file.in_crate() != home {
                    broken.push(at(file, line, &format!("{call}: {reason}")));
                }
            }
        }
    }
    broken
}

fn found<'a>(
    files: impl Iterator<Item = &'a File>,
    forbidden: impl Fn(&File) -> Vec<&'static str>,
    complaint: impl Fn(&str) -> String,
) -> Vec<String> {
    let mut broken = Vec::new();
    for file in files {
        let forbidden = forbidden(file);
        for (line, text) in file.code() {
            let text = without_strings(text);
            let hit = forbidden.iter().filter(|library| mentions(&text, library));
            broken.extend(hit.map(|library| at(file, line, &complaint(library))));
        }
    }
    broken
}

#[test]
fn finds_io_in_pure_modules() {
    for (path, text, expected) in [
        ("src/routing/pair.rs", "use tokio::time::sleep;", 1),
        ("src/load/cell.rs", "let now = std::time::Instant::now();", 1),
        ("src/load/cell.rs", "use std::time::{Duration, Instant};", 1),
        ("src/fleet/build.rs", "fn f(c: kube::Client) {}", 1),
        ("src/fleet/mod.rs", "use tokio::sync::watch;", 0),
        ("src/exchange/mod.rs", "use crate::clock::Tick; // not tokio", 0),
        ("src/request/body.rs", "#[cfg(test)]\nmod tests {\n use tokio::test;\n}", 0),
        ("src/bands/plan.rs", "use fred::prelude::*;", 1),
        ("src/state/ledger/view.rs", "use tokio::sync::watch;", 1),
        ("src/state/redis.rs", "use tokio::sync::watch;", 0),
    ] {
        assert_eq!(pure_modules(&[File::sample(path, text)]).len(), expected, "{path}: {text}");
    }
}

#[test]
fn finds_libraries_out_of_place() {
    for (path, text, expected) in [
        ("src/state/redis.rs", "use fred::prelude::*;", 0),
        ("src/state/redis/feed.rs", "use fred::prelude::*;", 0),
        ("src/state/ledger.rs", "use fred::prelude::*;", 1),
        ("src/state/wire.rs", "bincode::serde::decode_from_slice(bytes, c)", 1),
        ("src/state/codec.rs", "bincode::serde::decode_from_slice(bytes, c)", 0),
        ("src/admin/mod.rs", "use fred::prelude::*;", 1),
        ("src/scrape/mod.rs", "use kube::Api;", 1),
        ("src/front/mod.rs", "use tonic::Status;", 1),
        ("src/app.rs", "use tonic::transport::Server;", 0),
        ("src/app/serve.rs", "use tonic::transport::Server;", 0),
        ("src/telemetry/trace.rs", "use tonic::metadata::MetadataMap;", 0),
        ("src/telemetry/metrics.rs", "use tonic::metadata::MetadataMap;", 1),
        ("src/http_client.rs", "use hyper_util::client::legacy::Client;", 0),
        ("src/engines/leg.rs", "use hyper_util::client::legacy::Client;", 1),
        ("src/engines/vllm.rs", "use hyper_util::client::legacy::Client;", 1),
        ("src/discovery/kubernetes.rs", "use hyper::client::conn;", 1),
        ("src/engines/vllm.rs", "use hyper::body::Incoming;", 0),
        ("src/routing/mod.rs", "prometheus::IntGauge", 1),
        ("src/scrape/mod.rs", "\"/prometheus/metrics\"", 0),
        ("sim/src/lib.rs", "use hyper::client::conn;", 0),
    ] {
        assert_eq!(libraries(&[File::sample(path, text)]).len(), expected, "{path}: {text}");
    }
}

#[test]
fn finds_second_doors() {
    for (path, text, expected) in [
        ("src/knobs/env.rs", "std::env::var(name).ok()", 0),
        ("src/app.rs", "std::env::var(name).ok()", 1),
        ("src/app.rs", "std::env::var_os(name)", 1),
        ("src/app.rs", "env::vars()", 1),
        ("src/app.rs", "std::env::args()", 0),
        ("src/clock.rs", "tokio::time::Instant::now()", 0),
        ("src/drive/mod.rs", "tokio::time::Instant::now()", 1),
        ("src/drive/clock.rs", "tokio::time::Instant::now()", 1),
        ("src/drive/mod.rs", "SystemTime::now()", 1),
        ("src/drive/mod.rs", "clock.now()", 0),
        ("src/drive/mod.rs", "tokio::spawn(f)", 1),
        ("src/drive/mod.rs", "tokio::task::spawn(f)", 1),
        ("src/drive/mod.rs", "self.tracker.spawn(f)", 0),
        ("src/drive/mod.rs", "tokio::task::spawn_blocking(f)", 0),
    ] {
        assert_eq!(single_doors(&[File::sample(path, text)]).len(), expected, "{path}: {text}");
    }
}
