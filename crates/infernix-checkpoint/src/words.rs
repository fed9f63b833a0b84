//! Values of single stored words.

/// E2M1 code 0..16.
pub(crate) fn e2m1(code: u8) -> f32 {
    const T: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let v = T[(code & 7) as usize];
    if code & 8 == 0 { v } else { -v }
}

/// E4M3FN byte; NaN for 0x7f and 0xff.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (e, m) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let v = match byte & 0x7f {
        0x7f => f32::NAN,
        _ if e == 0 => m / 512.0,
        _ => (8.0 + m) * f32::powi(2.0, e - 10),
    };
    if byte & 0x80 == 0 { v } else { -v }
}

/// E8M0 byte, 2^(b - 127); NaN for 255.
pub(crate) fn e8m0(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 22),
        b => f32::from_bits(u32::from(b) << 23),
    }
}

/// BF16 bits.
pub(crate) fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// IEEE half bits.
pub(crate) fn f16(bits: u16) -> f32 {
    let (e, m) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3ff));
    let v = match e {
        0 => m * f32::powi(2.0, -24),
        31 if m == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        _ => (1024.0 + m) * f32::powi(2.0, e - 25),
    };
    if bits & 0x8000 == 0 { v } else { -v }
}
