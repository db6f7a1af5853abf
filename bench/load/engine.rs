//! An engine inside the load generator: both roles, no model, chunks that say when they were sent. Being in the same
//! process as the client, it shares its clock.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// Marks the time in a chunk.
const SENT: &[u8] = b"\"sent_ns\":";

/// The clock of one run.
#[derive(Clone, Copy)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    pub fn start() -> Stopwatch {
        Stopwatch(Instant::now())
    }

    /// One event, of the size that vLLM sends for a token.
    fn event(self) -> Bytes {
        let sent = self.0.elapsed().as_nanos();
        Bytes::from(format!(
            "data: {{\"id\":\"chatcmpl-9b2f1c7a5d3e4f60b1a2c3d4e5f60718\",\"object\":\"chat.completion.chunk\",\
             \"created\":1763817600,\"model\":\"bench\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word\"}},\
             \"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}],\"sent_ns\":{sent}}}\n\n"
        ))
    }

    /// How long ago each chunk in `data` was sent. A chunk that is cut by the end of `data` is left out.
    pub fn delays(self, data: &[u8]) -> impl Iterator<Item = Duration> {
        let now = self.0.elapsed();
        memchr::memmem::find_iter(data, SENT).filter_map(move |at| {
            let digits = data.get(at + SENT.len()..)?;
            let end = digits.iter().position(|byte| !byte.is_ascii_digit())?;
            let sent: u64 = std::str::from_utf8(digits.get(..end)?).ok()?.parse().ok()?;
            Some(now.saturating_sub(Duration::from_nanos(sent)))
        })
    }
}

type Body = BoxBody<Bytes, Infallible>;

fn whole(text: &'static str) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())).boxed());
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    response
}

/// Answers a streamed request with one chunk at once and `per_second` more until the client leaves (none for `None`),
/// and any other request, such as a prefill leg, at once.
async fn answer(request: Request<Incoming>, watch: Stopwatch, per_second: Option<u32>) -> Response<Body> {
    if request.method() == http::Method::GET {
        return whole("");
    }
    let Ok(body) = request.into_body().collect().await else { return whole("{}") };
    if memchr::memmem::find(&body.to_bytes(), b"\"stream\":true").is_none() {
        return whole(r#"{"choices":[],"kv_transfer_params":null}"#);
    }
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut beat = per_second.map(|rate| tokio::time::interval(Duration::from_secs(1) / rate));
        loop {
            if let Some(beat) = &mut beat {
                beat.tick().await;
            }
            if sender.send(Ok(Frame::data(watch.event()))).await.is_err() {
                return;
            }
            if beat.is_none() {
                return sender.closed().await;
            }
        }
    });
    let mut response = Response::new(http_body_util::BodyExt::boxed(StreamBody::new(ReceiverStream::new(receiver))));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/event-stream"));
    response
}

/// Starts it on a port of the loopback address.
pub async fn start(port: u16, watch: Stopwatch, per_second: Option<u32>) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(async move {
                let service =
                    service_fn(
                        move |request| async move { Ok::<_, Infallible>(answer(request, watch, per_second).await) },
                    );
                // Fails when the client leaves in the middle.
                let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    Ok(())
}
