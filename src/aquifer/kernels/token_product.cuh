// The product of a warpgroup in `hopper_linear.cu`: 64 rows of the weight and GROUP_TOKENS tokens, by 16
// columns of both. The instruction names all of its registers, so each number of tokens is written out.

#define NUMBERS72 NUMBERS64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NUMBERS80 NUMBERS72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define NUMBERS88 NUMBERS80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define NUMBERS96 NUMBERS88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define NUMBERS104 NUMBERS96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define NUMBERS112 NUMBERS104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define NUMBERS120 NUMBERS112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define NUMBERS128 NUMBERS120 ",%120,%121,%122,%123,%124,%125,%126,%127"

#if GROUP_TOKENS == 32
#define PRODUCT "m64n32k16"
#define RESULTS NUMBERS16
#define REGISTERS(r) F16(r, 0)
#define OPERANDS(macro) macro("%16", "%17", "%18", "%19")
#elif GROUP_TOKENS == 48
#define PRODUCT "m64n48k16"
#define RESULTS NUMBERS24
#define REGISTERS(r) F16(r, 0), F8(r, 16)
#define OPERANDS(macro) macro("%24", "%25", "%26", "%27")
#elif GROUP_TOKENS == 64
#define PRODUCT "m64n64k16"
#define RESULTS NUMBERS32
#define REGISTERS(r) F32(r, 0)
#define OPERANDS(macro) macro("%32", "%33", "%34", "%35")
#elif GROUP_TOKENS == 80
#define PRODUCT "m64n80k16"
#define RESULTS NUMBERS40
#define REGISTERS(r) F32(r, 0), F8(r, 32)
#define OPERANDS(macro) macro("%40", "%41", "%42", "%43")
#elif GROUP_TOKENS == 96
#define PRODUCT "m64n96k16"
#define RESULTS NUMBERS48
#define REGISTERS(r) F32(r, 0), F16(r, 32)
#define OPERANDS(macro) macro("%48", "%49", "%50", "%51")
#elif GROUP_TOKENS == 112
#define PRODUCT "m64n112k16"
#define RESULTS NUMBERS56
#define REGISTERS(r) F32(r, 0), F16(r, 32), F8(r, 48)
#define OPERANDS(macro) macro("%56", "%57", "%58", "%59")
#elif GROUP_TOKENS == 128
#define PRODUCT "m64n128k16"
#define RESULTS NUMBERS64
#define REGISTERS(r) F64(r, 0)
#define OPERANDS(macro) macro("%64", "%65", "%66", "%67")
#elif GROUP_TOKENS == 144
#define PRODUCT "m64n144k16"
#define RESULTS NUMBERS72
#define REGISTERS(r) F64(r, 0), F8(r, 64)
#define OPERANDS(macro) macro("%72", "%73", "%74", "%75")
#elif GROUP_TOKENS == 160
#define PRODUCT "m64n160k16"
#define RESULTS NUMBERS80
#define REGISTERS(r) F64(r, 0), F16(r, 64)
#define OPERANDS(macro) macro("%80", "%81", "%82", "%83")
#elif GROUP_TOKENS == 176
#define PRODUCT "m64n176k16"
#define RESULTS NUMBERS88
#define REGISTERS(r) F64(r, 0), F16(r, 64), F8(r, 80)
#define OPERANDS(macro) macro("%88", "%89", "%90", "%91")
#elif GROUP_TOKENS == 192
#define PRODUCT "m64n192k16"
#define RESULTS NUMBERS96
#define REGISTERS(r) F64(r, 0), F32(r, 64)
#define OPERANDS(macro) macro("%96", "%97", "%98", "%99")
#elif GROUP_TOKENS == 208
#define PRODUCT "m64n208k16"
#define RESULTS NUMBERS104
#define REGISTERS(r) F64(r, 0), F32(r, 64), F8(r, 96)
#define OPERANDS(macro) macro("%104", "%105", "%106", "%107")
#elif GROUP_TOKENS == 224
#define PRODUCT "m64n224k16"
#define RESULTS NUMBERS112
#define REGISTERS(r) F64(r, 0), F32(r, 64), F16(r, 96)
#define OPERANDS(macro) macro("%112", "%113", "%114", "%115")
#elif GROUP_TOKENS == 240
#define PRODUCT "m64n240k16"
#define RESULTS NUMBERS120
#define REGISTERS(r) F64(r, 0), F32(r, 64), F16(r, 96), F8(r, 112)
#define OPERANDS(macro) macro("%120", "%121", "%122", "%123")
#elif GROUP_TOKENS == 256
#define PRODUCT "m64n256k16"
#define RESULTS NUMBERS128
#define REGISTERS(r) F64(r, 0), F64(r, 64)
#define OPERANDS(macro) macro("%128", "%129", "%130", "%131")
#endif

#define PRODUCT_OF(rows, tokens, adds, high)                                  \
  "{\n"                                                                       \
  ".reg .pred adds;\n"                                                        \
  ".reg .b64 rows, tokens;\n"                                                 \
  "setp.ne.b32 adds, " adds ", 0;\n"                                          \
  "mov.b64 rows, {" rows ", " high "};\n"                                     \
  "mov.b64 tokens, {" tokens ", " high "};\n"                                 \
  "wgmma.mma_async.sync.aligned." PRODUCT ".f32." TYPE "." TYPE " {" RESULTS  \
  "}, rows, tokens, adds, 1, 1, 0, 0;\n"                                      \
  "}"

// sums[64, GROUP_TOKENS] (+)= rows[64, 16] tokens[GROUP_TOKENS, 16]^T
__device__ __forceinline__ void multiply(float* s, u32 rows, u32 tokens, int adds) {
  asm volatile(OPERANDS(PRODUCT_OF) : REGISTERS(s) : "r"(rows), "r"(tokens), "r"(adds), "n"(HIGH_WORD));
}
