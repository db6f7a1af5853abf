//! Spans as a backend sees them.

mod pipeline;
mod spans;
mod sync;

use std::sync::{Arc, Mutex};

use http::{HeaderMap, HeaderValue};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

/// Keeps what was exported.
#[derive(Clone, Debug, Default)]
struct Captured(Arc<Mutex<Vec<SpanData>>>);

impl Captured {
    fn spans(&self) -> Vec<SpanData> {
        self.0.lock().unwrap().clone()
    }

    fn named(&self, name: &str) -> Vec<SpanData> {
        self.spans().into_iter().filter(|span| span.name == name).collect()
    }

    fn one(&self, name: &str) -> SpanData {
        let mut spans = self.named(name);
        assert_eq!(spans.len(), 1, "{name}: {spans:?}");
        spans.remove(0)
    }
}

impl SpanExporter for Captured {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        self.0.lock().unwrap().extend(batch);
        Ok(())
    }
}

/// Keeps what was logged.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    headers
}
