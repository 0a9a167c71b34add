"""Code tables of the I types, stored as sets.

Each table of ggml's IQ formats is a set of short vectors over a few levels, sorted by their value as numbers whose
first component is the least significant digit. So a table is told completely by its members: here a bitmap over all
such numbers, deflated, in base 85. The members are facts of the file formats; they were read off libggml's decoder
and `tests/test_quant_decode.py` holds them against it.
"""

from __future__ import annotations

import base64
import zlib
from functools import lru_cache

import numpy as np
import torch

_TABLES: dict[str, tuple[tuple[int, ...], int, str]] = {
    "IQ2_XXS": (
        (8, 25, 43),
        8,
        "c-nPRORj`4470MbdWwiuj~R8vF<3s$DPNNQV8mEdDvh1mfzMz4@MsNM4-"
        "kL~Dg?0u3Z<Q}s#5&i%a^YL7=qILyw)W4Cso8iRnlpCLd`c4Du;C<RlH?aajd+e<FY7)k8>WSTt@47wX1jPqB41q=2e+&9hy;#r#"
        "nzQ(d`wV2I-N(E<X_7hks$x7)Do8!;TEvZcdv+$;Bf*s-;99+U-&7)=?KnsoS&M%ZZjW8ztGaG<oin^)>q~!#84@<5Q?C;cAe-"
        "jqH$lW6s<jvF<nQc*Z$~yKl@H%B$)D{-`Y{-_v~Aze0c0{sHUUCpi",
    ),
    "IQ2_XS": (
        (8, 25, 43),
        8,
        "c-mc2ORj`4470L|dWwh@;*?QWh*MOoP)|Aew9xme83;|{*iP^L>UVu^J$f&9<)%0;rYcZH@zkTcz*1-"
        "`0#F4vd)cqIa~EY0S(m36us~sl4e+uqnt+xnD5p1ifdk&k2^cqyDKl&hVwLuN#<u{Y#82-"
        "D2r2AS*#~B;6>b%zZ?$An2Qav5OyP;?IjC1*OUa>YNXBOJs!l*N%2M9ag1pZ#qbS<pDODX)Ys@FiGwcn?g7z}ZUJ85J?WuXe7)kq"
        "!xj_MC=sehbo`f6hw91-EjVApg;SBK(#S-"
        "ctqy5bslAAu_xaBeODLPcR%XL4jpOCvsj1dP@iIwgyVBr<uBI!nKMuUZZ1qQNNP<bV}FGN4KvRv{ky>(2~*Gt;x6q$P={6Cb#@3D"
        "fxx_wWh`vWo0U*P",
    ),
    "IQ2_S": (
        (8, 25, 43),
        8,
        "c-n1JOKt@r42!agI0c#&;*=39#3>LflvCCTO#7-"
        "9jpk=;Y=fB%TefG%OIlXuE_Fz<Ougf=%xu>+l3Bq8hyjg~lMrunmZ<Wy`~YGiEi#3On5vBd<vmKZSi%aW(psKWGWlAsphF>8rUC+"
        ";ZDfa(=s@_F#i0yss$-8fvv#Vf@jNV{kuiVLgA~66J1A2@4RVJKUxH}IH-"
        "$JpaZ^g})pmKjjd>lmojtPqGOJ!xqXVV(I)s3f1HneH&<4|id_Zsqi~d9|fZw$~1nHWO$bgs-"
        "@JBFei6qb36Asxo<#s4;BRhd~d<sfnbhG0<$t^)oE$@gK%zO1xyELVB%s1k`FAKZeJ@WjCtPZ6s4%XC=!ChZ<C{I5t%jB|RQ$q0^"
        "0H^%ZVVCdNfJ9HPfzZdmWSrg_I({bPgptf%^rJMcpz`hTS7u<>s9rVvW-WSa`T|j+oGk",
    ),
    "IQ3_XXS": (
        (4, 12, 20, 28, 36, 44, 52, 62),
        4,
        "c-l=-K?=h#3{ye}VW$qZd!FLL9+1HvWO^EVh1sdkoaHp#R7#szmgHo6m{j1}>~2z^o7e*jro|>W6f;suxGq5ThwwrH-"
        "tdy3S=*8VCKknJ;ww~xN=C-Lt2kc1f`n?I#<sN&{qc;xi`rsIog^>xCi>0vO72GEj+P?`#G30*;dkafo0(MD70~26E5oy)Fh-PS2"
        "J_iYxE!Gh>5A3e2Aw8l#Lz*UZ2xyz&!sE!Xy7=t?heopubnm$;UMyR4j1Wf!f;*xLWT6+u!rw*Hy!tqyDZ17JdzPtf@!~_J7yrh&"
        "WtZi",
    ),
    "IQ3_S": (
        (1, 3, 5, 7, 9, 11, 13, 15),
        4,
        "c-k#dK}rKb5Ud?m7(7iN59ovqtiR~U2pdlmS^v`sIn3TR;sZue5Z@6$Amj-`@D=vV+J}a&>aMEU{rNq)_mDQ1)6rXa`g-zl6)-"
        "xV9&D<-"
        "%sLtw(&E+K!8jAZAn=FIh`{BX?s3iZ9eL!0y{saQwa{i<M_rV8i?Gza!ZNf5Tx$=B>&%}&x2aFnb2>I1DZfG3@eJJ?w}Hf9jj>U<"
        "u}qaX$V(Q{%bJZi0qBwX8+P2=0D&xpG^*kpx3aC_+^woo1gDy;frCMb5s>PfCelExhl@Z5=M_J&lZwQK<TIaOt1Nd_t_Z4Nkqr(I"
        "rw~QLK*sjOloy2EUU#sN3YKfvLC9pG+yhGG#kO><KBF1{I~{B$E!8AqIlE}-"
        "BNQAl`R33C|JNFjj93D(#a!oZudm_a(c~OHe<Yb)Y4R?AVbTWv01QA~hX",
    ),
    "IQ1": (
        (-1, 0, 1),
        8,
        "c-k#eO>0z16uqyx#k83y_qA0qE*kA7fk#%6iL;cd<W&+S(JE7AEBc6nlGQ*KX*Z#@1057+gows$6w-"
        "}Cbfte_m;o2UY|_#*VZa~*x^U%6T=`Mm&aUdhx#ygF&eKOplgaU0)cQ?aLaWb`!=%}lC@i-"
        "gZEZ5CFdhU_><`D{U2pdIZAiiRBZ^Tjpc--1mjt-&r-"
        "O_l7bZy)3*%3zRUeyRXfJ~s5?<5PM<UK4aB<I3L}>n{hnc{+>K$G67mn>zvR$=UOtZPa7LUsmQWQ2bN)ou!Kj_yfb~LQyR=nku)`"
        "P+=g=?+GNRyF#AueD^;Yg67k)HG=(os>Uh!rG~(gRxZza2HhyPsM)=qh9|ehXUldkU;_wA!C+2Fv`rcq!34!0Fqz%0;&7#XeAmBu"
        "`}t6ci#>+3WlSwzITy{$0C$RU8lhlWkibbyz6nxOL=l|4%yAAJ4G^LV^S*V!(*CwdNU%)Qrh$#q9cyW*tq|@QQ}j896#XTv`6q5l"
        "hc&*LLPVeEGcad$xT4&D*b^FV9bJ+^}ih*A`2jX2rIue$9q9{)`S!jt!g=X1D{vGEMnukjj}Wcvs!oqc~_d61@aP1V3Bvcjc9uWp"
        "gt6=l#-;vm1GpU-HX*>(|GJ!F2C{R9{8qA7trFiLFJ0VD+S2Ny_0+jiaiUvPbU!Gt<44HyL$nQ%A{iI)xZW(;0iU=zRoe)YSg8LF"
        "F!L&Ei&Q)FngSxd==b)ez8IIEAq?gCPR1z1`cE#svx$dBcgrdMr~`+vY{G*{j)LdH7J(;|V_S3+rEqj0{aUGZ~5`z3=#nUT2ypkI"
        "bf^7Qd%#dKF#22&cWI$B=(k{y*i-P-%7a6aqltG8tC11XWn$8wuQe)#`Rb$ezM@h+=MX6ehv4>@KW-1MD8)wE",
    ),
}
"""Name -> (levels, components, members)."""

IQ4_LEVELS: tuple[int, ...] = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen values of IQ4_NL and IQ4_XS."""

E2M1_DOUBLED: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the sixteen values of the four-bit float E2M1, by code; ggml and SlimServe read both zeros as +0."""


@lru_cache
def grid_codes(name: str) -> torch.Tensor:
    """Table `name` as indices of levels, uint8 [entries, components]."""
    levels, components, text = _TABLES[name]
    bitmap = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype=np.uint8))
    members = np.flatnonzero(bitmap[: len(levels) ** components])
    digits = members[:, None] // len(levels) ** np.arange(components) % len(levels)
    return torch.from_numpy(digits.astype(np.uint8))


@lru_cache
def grid(name: str) -> torch.Tensor:
    """Table `name` with its values, int8 [entries, components]; "IQ1" serves IQ1_S and IQ1_M."""
    levels = torch.tensor(_TABLES[name][0], dtype=torch.int8)
    return levels[grid_codes(name).long()]


@lru_cache
def parity_signs() -> torch.Tensor:
    """Sign bytes of the 7-bit sign indices, uint8 [128]: bit 7 makes the number of minus signs even."""
    index = torch.arange(128, dtype=torch.int64)
    ones = sum((index >> bit) & 1 for bit in range(7))
    assert isinstance(ones, torch.Tensor)
    return (index | ((ones & 1) << 7)).to(torch.uint8)
