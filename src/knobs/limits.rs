//! Bounds on what clients and engines may send.

use std::time::Duration;

use super::Limits;
use super::parse;
use super::read::{Reader, secs};

const BODY: &str = "TANDEM_MAX_BODY_BYTES";
const GRPC: &str = "AIBRIX_GRPC_MAX_MESSAGE_SIZE_BYTES";

/// What an ext_proc message holds beside the body: field headers, attributes, metadata.
const GRPC_OVERHEAD: usize = 4 << 10;
/// Room for that in the default.
const GRPC_ROOM: usize = 1 << 20;

pub(super) fn read(reader: &mut Reader<'_>) -> Limits {
    let size = |reader: &mut Reader<'_>, name, default: u64| {
        let default = usize::try_from(default).unwrap_or(usize::MAX);
        reader.value(name, default, parse::positive_size, usize::to_string)
    };
    let max_body_bytes = size(reader, BODY, 64 << 20);
    let max_buffered_bytes = size(reader, "TANDEM_MAX_BUFFERED_BYTES", 2 << 30);
    let max_streams = size(reader, "TANDEM_MAX_STREAMS", 20_000);
    let max_prefill_answer_bytes = size(reader, "TANDEM_MAX_PREFILL_ANSWER_BYTES", 64 << 20);
    let (max_body_bytes, max_grpc_message_bytes) = read_message_size(reader, max_body_bytes);
    let time = |reader: &mut Reader<'_>, name| reader.value(name, Duration::from_mins(5), parse::seconds, secs);
    Limits {
        max_body_bytes,
        max_buffered_bytes,
        max_streams,
        max_front_connections: size(reader, "TANDEM_FRONT_MAX_CONNECTIONS", 20_000),
        front_origins: reader
            .optional("TANDEM_FRONT_CORS_ORIGINS", parse::origins, |origins| origins.join(","))
            .unwrap_or_default(),
        front_body_timeout: time(reader, "TANDEM_FRONT_BODY_TIMEOUT_SECONDS"),
        front_stall_timeout: time(reader, "TANDEM_FRONT_STALL_TIMEOUT_SECONDS"),
        max_prefill_answer_bytes,
        max_grpc_message_bytes,
    }
}

/// The limits of bodies and of ext_proc messages. In the reference the second is the only limit of bodies and 4 MiB unless set,
/// and its manifests say so once more: a larger value asks for larger bodies, a smaller one for nothing.
fn read_message_size(reader: &mut Reader<'_>, body: usize) -> (usize, usize) {
    let needed = body.saturating_add(GRPC_ROOM);
    let message = reader.value(GRPC, needed, parse::positive_size, usize::to_string);
    if message < body.saturating_add(GRPC_OVERHEAD) {
        reader
            .note(format!("{GRPC} is {message} and lowers nothing: bodies of up to {body} bytes pass, as {BODY} says"));
        (body, needed)
    } else if message > needed && reader.raw(BODY).is_none() {
        (message - GRPC_OVERHEAD, message)
    } else {
        (body, message)
    }
}
