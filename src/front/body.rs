//! Bodies that the front sends.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Frame};
use tokio::sync::mpsc;

/// The answer breaks off: hyper then closes the connection without the closing chunk.
#[derive(Debug, thiserror::Error)]
#[error("the answer is cut short")]
pub struct Cut;

/// Either kind of body.
pub type FrontBody = UnsyncBoxBody<Bytes, Cut>;

/// A whole body.
pub fn full(bytes: Bytes) -> FrontBody {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// An answer on its way: it ends well only if its sender said so. A sender that just goes away, whatever took it away,
/// leaves an answer that the client can tell from a complete one.
#[derive(Debug)]
pub struct AnswerBody {
    chunks: mpsc::Receiver<Bytes>,
    complete: Arc<AtomicBool>,
    /// The break was put off once.
    paused: bool,
}

/// The sending half of an [`AnswerBody`].
#[derive(Debug)]
pub struct AnswerSender {
    chunks: mpsc::Sender<Bytes>,
    complete: Arc<AtomicBool>,
}

impl AnswerBody {
    /// Both halves, over a channel.
    pub fn new(sender: mpsc::Sender<Bytes>, receiver: mpsc::Receiver<Bytes>) -> (AnswerSender, AnswerBody) {
        let complete = Arc::new(AtomicBool::new(false));
        let body = AnswerBody { chunks: receiver, complete: Arc::clone(&complete), paused: false };
        (AnswerSender { chunks: sender, complete }, body)
    }
}

impl AnswerSender {
    /// Sends a chunk; waits while the client is slow. Nothing happens when the client is gone.
    pub async fn send(&self, chunk: Bytes) {
        if !chunk.is_empty() {
            let _ = self.chunks.send(chunk).await;
        }
    }

    /// All of it was sent.
    pub fn complete(self) {
        self.complete.store(true, Ordering::Release);
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.chunks.closed().await;
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        Poll::Ready(match ready!(self.chunks.poll_recv(cx)) {
            Some(chunk) => Some(Ok(Frame::data(chunk))),
            None if self.complete.load(Ordering::Acquire) => None,
            // An error makes the connection drop what it has not written yet: first it writes.
            None if !std::mem::replace(&mut self.paused, true) => {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            None => Some(Err(Cut)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_sender_that_says_so_completes() {
        for complete in [true, false] {
            let (sender, receiver) = mpsc::channel(2);
            let (sender, body) = AnswerBody::new(sender, receiver);
            sender.send(Bytes::new()).await;
            sender.send(Bytes::from_static(b"a")).await;
            if complete {
                sender.complete();
            } else {
                drop(sender);
            }
            #[expect(clippy::disallowed_methods, reason = "a body of our own")]
            let collected = body.collect().await;
            assert_eq!(collected.ok().map(http_body_util::Collected::to_bytes), complete.then(|| Bytes::from("a")));
        }
    }
}
