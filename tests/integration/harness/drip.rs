//! A body that takes its time.

use std::time::Duration;

use axum::body::Body;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

/// How slow it is, and how long the server has patience.
#[derive(Clone, Copy, Debug)]
pub struct Drip {
    /// Bytes in a second.
    pub rate: u64,
    /// The server breaks the answer off after so long, as API servers do.
    pub cut: Option<Duration>,
}

/// The time between two pieces.
const STEP: Duration = Duration::from_millis(20);

/// `text`, in pieces.
pub fn body(text: &str, drip: Drip) -> Body {
    let bytes = text.as_bytes().to_vec();
    let (pieces, stream) = mpsc::channel::<Result<Vec<u8>, std::io::Error>>(1);
    tokio::spawn(async move {
        let began = Instant::now();
        let size = usize::try_from(drip.rate).expect("a rate") / 50;
        for (piece, number) in bytes.chunks(size.max(1)).zip(0u32..) {
            tokio::time::sleep_until(began + STEP * number).await;
            if drip.cut.is_some_and(|cut| began.elapsed() >= cut) {
                let _gone = pieces.send(Err(std::io::Error::other("the request takes too long"))).await;
                return;
            }
            if pieces.send(Ok(piece.to_vec())).await.is_err() {
                return;
            }
        }
    });
    Body::from_stream(ReceiverStream::new(stream))
}
