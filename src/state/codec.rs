//! How values become bytes.
//!
//! Two forms. An *envelope* is `[magic, version]` and a bincode payload: for values that no script opens. A reader of
//! version n also reads n − 1, so that replicas of two versions can work side by side while a new one is rolled out.
//! A *packed* value is bare bincode in fixed-width little-endian numbers, which is what `struct` in Redis's Lua reads and
//! writes. Input from outside is hostile: it is decoded within a limit, and what is left over is an error.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The first byte of every envelope.
pub const MAGIC: u8 = 0xd7;

/// Bytes that a decoded value may claim to need; a longer payload is refused before anything is allocated for it.
pub const LIMIT: usize = 4 << 20;

/// Why bytes are no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// They end too early, or name lengths beyond the limit.
    #[error("malformed payload: {0}")]
    Malformed(String),
    /// Something follows the value.
    #[error("{0} bytes follow the payload")]
    Trailing(usize),
    /// Not an envelope of ours.
    #[error("not a payload of this plane")]
    Foreign,
    /// An envelope of a version that this replica does not read.
    #[error("payload version {0} is not read here")]
    Version(u8),
}

fn envelope() -> Configuration<LittleEndian, bincode::config::Varint, Limit<LIMIT>> {
    bincode::config::standard().with_limit::<LIMIT>()
}

fn packed() -> Configuration<LittleEndian, Fixint, Limit<LIMIT>> {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<LIMIT>()
}

/// A value that travels in an envelope.
pub trait Versioned: Serialize + DeserializeOwned {
    /// The version that is written.
    const VERSION: u8;

    /// Reads the payload of the version before, where there is one.
    fn read_previous(payload: &[u8]) -> Option<Result<Self, CodecError>>;
}

/// Puts a value into an envelope.
pub fn encode<T: Versioned>(value: &T) -> Result<Vec<u8>, CodecError> {
    let mut bytes = vec![MAGIC, T::VERSION];
    bincode::serde::encode_into_std_write(value, &mut bytes, envelope()).map_err(malformed)?;
    Ok(bytes)
}

/// Takes a value out of its envelope.
pub fn decode<T: Versioned>(bytes: &[u8]) -> Result<T, CodecError> {
    match bytes {
        [MAGIC, version, payload @ ..] if *version == T::VERSION => decode_payload(payload),
        [MAGIC, version, payload @ ..] if version.checked_add(1) == Some(T::VERSION) => {
            T::read_previous(payload).unwrap_or(Err(CodecError::Version(*version)))
        }
        [MAGIC, version, ..] => Err(CodecError::Version(*version)),
        _ => Err(CodecError::Foreign),
    }
}

/// Reads a payload: what is behind the version.
pub fn decode_payload<T: DeserializeOwned>(payload: &[u8]) -> Result<T, CodecError> {
    let (value, used) = bincode::serde::decode_from_slice(payload, envelope()).map_err(malformed)?;
    match payload.len().saturating_sub(used) {
        0 => Ok(value),
        left => Err(CodecError::Trailing(left)),
    }
}

/// Appends a packed value to `bytes`.
pub fn pack<T: Serialize>(value: &T, bytes: &mut Vec<u8>) -> Result<(), CodecError> {
    bincode::serde::encode_into_std_write(value, bytes, packed()).map_err(malformed)?;
    Ok(())
}

/// Reads a packed value from the front of `bytes`, and leaves what follows it.
pub fn unpack<T: DeserializeOwned>(bytes: &mut &[u8]) -> Result<T, CodecError> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, packed()).map_err(malformed)?;
    *bytes = bytes.get(used..).unwrap_or_default();
    Ok(value)
}

/// Nothing may be left.
pub fn finished(bytes: &[u8]) -> Result<(), CodecError> {
    if bytes.is_empty() { Ok(()) } else { Err(CodecError::Trailing(bytes.len())) }
}

fn malformed(error: impl std::fmt::Display) -> CodecError {
    CodecError::Malformed(error.to_string())
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Old {
        pods: Vec<u64>,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct New {
        pods: Vec<u64>,
        name: String,
    }

    impl Versioned for Old {
        const VERSION: u8 = 1;
        fn read_previous(_: &[u8]) -> Option<Result<Old, CodecError>> {
            None
        }
    }

    impl Versioned for New {
        const VERSION: u8 = 2;
        fn read_previous(payload: &[u8]) -> Option<Result<New, CodecError>> {
            Some(decode_payload::<Old>(payload).map(|old| New { pods: old.pods, name: String::new() }))
        }
    }

    #[test]
    fn golden_bytes() {
        let bytes = encode(&New { pods: vec![1, 300], name: "ab".to_owned() }).unwrap();
        assert_eq!(bytes, [0xd7, 2, 2, 1, 251, 44, 1, 2, b'a', b'b']);
        let mut bytes = Vec::new();
        pack(&(1u32, 2u64, [7u8; 3]), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7]);
    }

    #[test]
    fn the_version_before_is_read_and_no_other() {
        let old = encode(&Old { pods: vec![5] }).unwrap();
        assert_eq!(decode::<New>(&old).unwrap(), New { pods: vec![5], name: String::new() });
        assert_eq!(decode::<Old>(&old).unwrap(), Old { pods: vec![5] });
        let new = encode(&New { pods: vec![], name: "n".into() }).unwrap();
        assert_eq!(decode::<Old>(&new), Err(CodecError::Version(2)));
        assert_eq!(decode::<Old>(&[MAGIC, 0, 0]), Err(CodecError::Version(0)));
        assert_eq!(decode::<New>(&[MAGIC, 255, 0]), Err(CodecError::Version(255)));
    }

    #[test]
    fn what_is_not_a_value_is_an_error() {
        for bytes in [&[][..], &[MAGIC], b"{}", &[0, 1, 0]] {
            assert_eq!(decode::<Old>(bytes), Err(CodecError::Foreign));
        }
        let whole = encode(&Old { pods: vec![1, 2, 3] }).unwrap();
        for end in 2..whole.len() {
            assert!(matches!(decode::<Old>(&whole[..end]), Err(CodecError::Malformed(_))), "cut at {end}");
        }
        let mut long = whole;
        long.push(0);
        assert_eq!(decode::<Old>(&long), Err(CodecError::Trailing(1)));
        // A length of 2^60 elements: refused, not allocated.
        let huge = [MAGIC, 1, 253, 0, 0, 0, 0, 0, 0, 0, 16];
        assert!(matches!(decode::<Old>(&huge), Err(CodecError::Malformed(_))));
        assert_eq!(finished(&[1]), Err(CodecError::Trailing(1)));
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let _ = decode::<New>(&bytes);
            let _ = unpack::<(u32, u64)>(&mut bytes.as_slice());
        }
    }
}
