//! Instruction sets the kernels dispatch on.

use std::fmt;
use std::sync::OnceLock;

/// A tier of vector instructions. Tiers differ in speed only: every kernel gives the same bits on each of them, except
/// that products of BF16 *weights* under 2^-126 vanish where the processor's BF16 dot product flushes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, fused multiply-adds from the C library; the oracle of the others.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, VBMI-free; BF16 products widened.
    Avx512,
    /// The above with VNNI and BF16 dot products.
    Avx512Bf16,
}

impl Isa {
    /// All tiers, slowest first.
    pub const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// Whether this processor has the tier.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("bmi2")
            };
            let avx512 = || {
                avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            };
            match self {
                Isa::Scalar => true,
                Isa::Avx2 => avx2(),
                Isa::Avx512 => avx512(),
                Isa::Avx512Bf16 => {
                    avx512()
                        && is_x86_feature_detected!("avx512bf16")
                        && is_x86_feature_detected!("avx512vnni")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Scalar
        }
    }

    /// The best tier of this processor.
    pub fn detect() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Isa::ALL.into_iter().rev().find(|i| i.available()).unwrap_or(Isa::Scalar))
    }

    /// Tiers this processor has, for tests; prints which are missing.
    #[cfg(test)]
    pub(crate) fn testable() -> Vec<Isa> {
        let (have, lack): (Vec<_>, Vec<_>) = Isa::ALL.into_iter().partition(|i| i.available());
        for i in lack {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "skipped {i}: this processor lacks it");
        }
        have
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
        })
    }
}

/// Compiles one body for every tier and dispatches on its first argument. The body must be a pure function of its
/// arguments written so that the compiler may vectorise it; fused multiply-adds are written `mul_add`, reductions over
/// fixed arrays of lanes, so all tiers give the same bits.
macro_rules! per_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::backend::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
            fn v4($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi2")]
            fn v3($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            match isa {
                #[cfg(target_arch = "x86_64")]
                $crate::backend::cpu::isa::Isa::Avx512 | $crate::backend::cpu::isa::Isa::Avx512Bf16 => {
                    // SAFETY: an `Isa` reaches a kernel only after `Isa::available` said the processor has it.
                    unsafe { v4($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::backend::cpu::isa::Isa::Avx2 => {
                    // SAFETY: as above.
                    unsafe { v3($($arg),*) }
                }
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use per_isa;
