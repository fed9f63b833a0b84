//! Names of the places where a value is rounded.

/// Which rounding of a layer this is. The numbers are part of the stochastic-rounding key: never renumber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[expect(missing_docs, reason = "each name is the operand that is rounded")]
pub enum Op {
    Embed = 0,
    InputNorm = 1,
    PostNorm = 2,
    MixerAdd = 3,
    FfnAdd = 4,
    FinalNorm = 5,
    Head = 6,
    // hyper-connections: before the mixer, before the experts, after the last layer
    MixerHyper = 16,
    MixerHyperDown = 17,
    MixerHyperUp = 18,
    MixerHyperFactor = 19,
    FfnHyper = 20,
    FfnHyperDown = 21,
    FfnHyperUp = 22,
    FfnHyperFactor = 23,
    FinalHyper = 24,
    FinalHyperDown = 25,
    FinalHyperUp = 26,
    FinalHyperFactor = 27,
    MixerInject = 28,
    FfnInject = 29,
    // PLE
    NgramRow = 32,
    PleKey = 33,
    PleValue = 34,
    PleNormKey = 35,
    PleNormQuery = 36,
    PleScore = 37,
    PleGate = 38,
    PleNormConv = 39,
    PleConv = 40,
    // gated delta rule
    GdnQkv = 48,
    GdnZ = 49,
    GdnA = 50,
    GdnB = 51,
    GdnConv = 52,
    GdnDecay = 53,
    GdnBeta = 54,
    GdnState = 55,
    GdnOut = 56,
    GdnGate = 57,
    GdnO = 58,
    // attention
    AttnQ = 64,
    AttnGate = 65,
    AttnK = 66,
    AttnV = 67,
    AttnNormQ = 68,
    AttnNormK = 69,
    AttnOut = 70,
    AttnGated = 71,
    AttnO = 72,
    IndexQ = 73,
    IndexK = 74,
    IndexNormQ = 75,
    IndexPooled = 76,
    IndexScore = 77,
    // dense MLP and shared expert
    MlpGate = 80,
    MlpUp = 81,
    MlpHidden = 82,
    MlpDown = 83,
    // experts
    Router = 88,
    RouteWeight = 89,
    SharedLogit = 90,
    SharedWeight = 91,
    ExpertGate = 92,
    ExpertUp = 93,
    ExpertHidden = 94,
    ExpertDown = 95,
    ExpertOut = 96,
    // drafter
    MtpNormEmbedding = 104,
    MtpNormHidden = 105,
    MtpFc = 106,
    MtpFcHidden = 107,
    MtpAdd = 108,
}

impl Op {
    /// The four roundings of a hyper-connection mixer: norm, down, up, factor.
    pub fn hyper(self) -> [Op; 4] {
        match self {
            Op::FfnHyper => [Op::FfnHyper, Op::FfnHyperDown, Op::FfnHyperUp, Op::FfnHyperFactor],
            Op::FinalHyper => [Op::FinalHyper, Op::FinalHyperDown, Op::FinalHyperUp, Op::FinalHyperFactor],
            _ => [Op::MixerHyper, Op::MixerHyperDown, Op::MixerHyperUp, Op::MixerHyperFactor],
        }
    }
}

/// A rounding of the graph: layer and operation. The embedding, the end of the model and the drafter count as layers
/// of their own (`Site::GLOBAL`, `Site::DRAFTER`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// Decoder layer, or one of the constants.
    pub layer: u16,
    /// Operation in it.
    pub op: Op,
}

impl Site {
    /// Layer number of everything outside decoder layers.
    pub const GLOBAL: u16 = u16::MAX;
    /// Layer number of the drafter.
    pub const DRAFTER: u16 = u16::MAX - 1;
}

/// Identity of a row: which stream (chunk index or request seed) and which sequence index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowKey {
    /// Chunk index or request seed.
    pub stream: u64,
    /// Sequence index, not the rotary position.
    pub position: u64,
}

/// Site and row identities of one operation.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    /// Where.
    pub site: Site,
    /// One key for each row of the operand.
    pub rows: &'a [RowKey],
}

impl<'a> At<'a> {
    /// The same rows and layer at another operation.
    pub fn op(self, op: Op) -> At<'a> {
        At { site: Site { layer: self.site.layer, op }, rows: self.rows }
    }
}
