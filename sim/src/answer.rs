//! Answers on their way out: whole or streamed, with the scripted fault applied chunk by chunk.
//!
//! A body carries the future that produces it. When the connection drops the body, the future drops with it, and with
//! the future everything the request holds.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

use crate::ambient;
use crate::conn::Conn;
use crate::fault::{Cut, Fault, pieces};
use crate::state::Served;

/// Pause that makes the connection flush, so that separate chunks are separate writes.
const FLUSH: Duration = Duration::from_millis(1);
/// The last event of an OpenAI stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// What a scripted error event looks like in a stream of this dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorStyle {
    /// An event and `[DONE]`.
    Event(&'static str),
    /// An event and `[DONE]` twice, as TensorRT-LLM's completions may do.
    EventAndTwoDones(&'static str),
    /// The connection is closed, as TensorRT-LLM's chat does.
    Cut,
}

/// What a handler answers.
pub(crate) enum Reply {
    /// A body known as a whole.
    Whole {
        /// Status.
        status: u16,
        /// Headers beside the ones every answer has.
        headers: Vec<(String, String)>,
        /// Body.
        body: Bytes,
    },
    /// An event stream, status 200.
    Stream(Box<dyn FnOnce(Outlet) -> BoxFuture<'static, ()> + Send>),
    /// Writes given word for word.
    Raw {
        /// Status.
        status: u16,
        /// Headers.
        headers: Vec<(String, String)>,
        /// Writes.
        writes: Vec<Bytes>,
        /// Whether to leave the length out.
        chunked: bool,
    },
}

impl Reply {
    /// A JSON answer.
    pub fn json(status: u16, body: impl Into<Bytes>) -> Reply {
        Reply::with_type(status, "application/json", body)
    }

    /// An answer of another type.
    pub fn with_type(status: u16, content_type: &str, body: impl Into<Bytes>) -> Reply {
        let headers = vec![("content-type".to_owned(), content_type.to_owned())];
        Reply::Whole { status, headers, body: body.into() }
    }

    /// A value as JSON.
    pub fn value(status: u16, value: &impl serde::Serialize) -> Reply {
        // Only a map with keys that are not strings could fail, and no answer has one.
        Reply::json(status, serde_json::to_vec(value).unwrap_or_default())
    }
}

/// The stream ended early: an injected error event was sent.
#[derive(Debug)]
pub(crate) struct Ended;

/// Where a producer writes to.
pub(crate) struct Outlet {
    sender: mpsc::Sender<Bytes>,
    conn: Arc<Conn>,
    fault: Option<Fault>,
    error: ErrorStyle,
    sent: u32,
}

impl Outlet {
    /// Sends one chunk, unless the fault has something else in mind for this place.
    pub async fn chunk(&mut self, bytes: impl Into<Bytes>) -> Result<(), Ended> {
        let bytes = bytes.into();
        let Some(fault) = self.fault.clone() else {
            self.send(bytes).await;
            return Ok(());
        };
        if self.sent == 0 {
            ambient::pause(fault.first_byte_delay).await;
        }
        self.interfere(&fault).await;
        if fault.error_event_after == Some(self.sent) {
            return self.fail().await;
        }
        self.sent += 1;
        let parts = pieces(bytes, &fault.split);
        let several = parts.len() > 1;
        for part in parts {
            self.send(part).await;
            if several {
                tokio::time::sleep(fault.piece_pause.max(FLUSH)).await;
            }
        }
        Ok(())
    }

    /// The scripted error, in the dialect's way.
    async fn fail(&self) -> Result<(), Ended> {
        let (event, dones) = match self.error {
            ErrorStyle::Event(event) => (event, 1),
            ErrorStyle::EventAndTwoDones(event) => (event, 2),
            ErrorStyle::Cut => return self.cut_off().await,
        };
        self.send(Bytes::from_static(event.as_bytes())).await;
        for _ in 0..dones {
            self.send(Bytes::from_static(DONE.as_bytes())).await;
        }
        Err(Ended)
    }

    /// Closes the connection in the middle of the answer.
    pub async fn cut_off(&self) -> Result<(), Ended> {
        tokio::time::sleep(FLUSH * 2).await;
        self.cut(Cut::Close).await;
        Err(Ended)
    }

    /// Sends the final `[DONE]`.
    pub async fn done(&mut self) -> Result<(), Ended> {
        if self.fault.as_ref().is_some_and(|fault| fault.omit_done) {
            return Ok(());
        }
        self.chunk(Bytes::from_static(DONE.as_bytes())).await
    }

    /// Sends writes as they are, each flushed on its own.
    async fn writes(&mut self, writes: Vec<Bytes>) {
        for write in writes {
            if self.chunk(write).await.is_err() {
                return;
            }
            tokio::time::sleep(self.fault.as_ref().map_or(FLUSH, |fault| fault.piece_pause.max(FLUSH))).await;
        }
        self.finish().await;
    }

    /// Sends a whole body, in pieces where the fault asks for them.
    async fn whole(&mut self, body: Bytes) {
        let parts = match &mut self.fault {
            Some(fault) if !fault.split.is_empty() => pieces(body, &std::mem::take(&mut fault.split)),
            Some(fault) if fault.cut_after.is_some() || fault.stall_after.is_some() => {
                pieces(body.clone(), &[body.len() / 2 + 1])
            }
            _ => vec![body],
        };
        if parts.len() > 1 {
            return self.writes(parts).await;
        }
        for part in parts {
            // Nothing follows, so it does not matter whether the stream ended here.
            let _ = self.chunk(part).await;
        }
        self.finish().await;
    }

    /// The place after the last chunk is also a place where a fault can strike.
    pub async fn finish(&mut self) {
        if let Some(fault) = self.fault.clone() {
            self.interfere(&fault).await;
        }
    }

    async fn interfere(&self, fault: &Fault) {
        if fault.stall_after == Some(self.sent) {
            std::future::pending::<()>().await;
        }
        if let Some(cut) = fault.cut_after.filter(|cut| cut.chunks == self.sent) {
            // What was sent so far must reach the wire first.
            tokio::time::sleep(FLUSH * 2).await;
            self.cut(cut.how).await;
        }
    }

    async fn cut(&self, how: Cut) {
        self.conn.cut(how);
        std::future::pending::<()>().await;
    }

    async fn send(&self, bytes: Bytes) {
        // The receiver lives in the body that polls this future: it cannot be gone.
        let _ = self.sender.send(bytes).await;
    }
}

/// An answer body: its producer, and the record that is closed when it ends.
pub(crate) struct SimBody {
    producer: Option<BoxFuture<'static, ()>>,
    chunks: mpsc::Receiver<Bytes>,
    remaining: Option<u64>,
    served: Option<Served>,
}

impl SimBody {
    /// The body of `reply`, and its declared length.
    pub fn new(
        reply: Reply,
        conn: Arc<Conn>,
        mut fault: Option<Fault>,
        error: ErrorStyle,
        served: Option<Served>,
    ) -> SimBody {
        let (sender, chunks) = mpsc::channel(1);
        if let Some(fault) = fault.as_mut().filter(|_| !matches!(reply, Reply::Stream(_))) {
            fault.error_event_after = None;
        }
        let mut outlet = Outlet { sender, conn, fault, error, sent: 0 };
        let (producer, remaining): (BoxFuture<'static, ()>, _) = match reply {
            Reply::Whole { body, .. } => {
                let length = body.len() as u64;
                (Box::pin(async move { outlet.whole(body).await }), Some(length))
            }
            Reply::Raw { writes, chunked, .. } => {
                let length = writes.iter().map(|write| write.len() as u64).sum();
                (Box::pin(async move { outlet.writes(writes).await }), (!chunked).then_some(length))
            }
            Reply::Stream(start) => (start(outlet), None),
        };
        let mut body = SimBody { producer: Some(producer), chunks, remaining, served };
        if remaining == Some(0) {
            body.complete();
        }
        body
    }

    /// Turns it into a body that is never sent: the answer to HEAD.
    pub fn without_content(mut self) -> SimBody {
        self.complete();
        self
    }

    fn complete(&mut self) {
        self.producer = None;
        if let Some(served) = self.served.take() {
            served.complete();
        }
    }
}

impl Body for SimBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        loop {
            if let Poll::Ready(next) = this.chunks.poll_recv(cx) {
                let Some(bytes) = next else {
                    this.complete();
                    return Poll::Ready(None);
                };
                if let Some(remaining) = &mut this.remaining {
                    *remaining = remaining.saturating_sub(bytes.len() as u64);
                    if *remaining == 0 {
                        this.complete();
                    }
                }
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            let Some(producer) = &mut this.producer else { return Poll::Pending };
            match producer.as_mut().poll(cx) {
                // The sender went with it, so the channel now drains and then ends.
                Poll::Ready(()) => this.producer = None,
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.remaining == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
