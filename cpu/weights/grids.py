"""The grids of the formats IQ1, IQ2 and IQ3: an index selects a group of 8 or 4 elements.

An element has one of few values. A grid stores the number of that value in ``n_bits`` bits, the
first element lowest. The numbers are compressed with zlib and written in base 85. The grids equal
gguf's (tests/cpu/weights/test_grids.py).
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """width: elements of a group. values: possible values of an element. packed: all groups."""

    width: int
    values: tuple[int, ...]
    packed: str

    @property
    def n_bits(self) -> int:
        """Bits of the number of a value."""
        return (len(self.values) - 1).bit_length()


@cache
def _numbers(name: str) -> np.ndarray:
    """Returns the number of each element's value, (groups, elements of a group)."""
    width, _, packed = GRIDS[name]
    data = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    bits = np.unpackbits(data, bitorder="little").reshape(-1, width, GRIDS[name].n_bits)
    return bits @ (1 << np.arange(GRIDS[name].n_bits))


def grid(name: str) -> np.ndarray:
    """Returns the grid of the format ``name``, i8 (groups, elements of a group)."""
    return np.array(GRIDS[name].values, np.int8)[_numbers(name)]


def packed_groups(name: str) -> np.ndarray:
    """Returns i64 (groups,): the numbers of a group's elements, up to 16 bits, the first lowest."""
    return _numbers(name) @ (1 << GRIDS[name].n_bits * np.arange(GRIDS[name].width))


GRIDS = {
    "IQ2_XXS": Grid(
        8,
        (8, 25, 43),
        "c-jTQ!D`|_7y#gZhJR$tX-1;NJ&h6<w@>jWBoccXi<N9oi72>lF$tq|dy2(Ed$Ywu_bvDP05}Mc5P*gd3`}7TcaT"
        "5^7D}jL2M$_zfiGYTnPNjm%(Hg}obxGfIYUH+6O55C#R4mA&|`-;1i^(AMl8f1;lx?=d#Xo0-@Eld3MpkM=Q5F*w"
        "DLhdOYBph2VuYzDy1fhRHeM?)SCh=wb52TX{X~sK7de$CY*)K(1p=(JA~0_#3GDTL{SsLSd6dZ)ekV-1ST`Jai%r"
        "DCdCA%e9B^sRZQ_FhFLP(&AOj*ZswPHcE<=wQA87piKw6rRn(BDjvz5fow($fuvDc*x=9ZyWHK|E%RaI}9_O%N1s"
        "1BHA}?TBF6(8x%<sE<u+nNfw#GX9Y;l#YZmaV{w|-p*k8HEvK&i`dxhv_ne8NgqR2?d)AM0paZDA*NYCqWfeR=@L"
        "UEmVeI&7kb8r?FFUiqOXUwJq#j+bNqM5pS+pYgAL!A^B?N8M*PI=gfJ3YY06yR6=tck{uo_IkYbKjAC7*>C*!9|e"
        "4GT>",
    ),
    "IQ2_XS": Grid(
        8,
        (8, 25, 43),
        "c-jTQQBUeT7y#h6O}iAX+NGH3RUu%IU(qg|8D4c}5Ik3t$QKX4q9fBxuF#-SuO{)B$*=sL2LJ;F23-&!;RH@W!2m"
        "`u1_Kr@VG0heVFnAhg*))Dfd{DJ8TRl24Io5NfI5hy5cN=m&QKo>kw!5}P>M2?qXONd5>;r20Aoxs!vagJu)!8PJ"
        "i{JuF(QNnq(e9fNsmONPliO3m?R`68Oh0<6r>~-*%6?aQp%{Hk}7JbrH<ZGPf<Vu9-Id{h=VEsh8bmyb(vt2DK=t"
        ";S?1V+dDgHaLmkrL9o;EAPaWv0?zsEbZMujP9`Fw5Jmftd@jf4N&10VMlxIBW1z+=$SA54oU_k{FLP(*65mq?i#a"
        "_G#6p}Cqd8or81c@b;ObRKbl15rNl}_GCFHw*5cu)7>M4n7fP(&ggg^`Z(=rMv*divjKcJ_M)3M;CZ>MEh6QpzZ+"
        "obswss89O5uls3#)rY}g;0Nsh4atxXFNS&uBQv@leT>lg+4;{ojM=z5R^!>Y9v{Z{7rP5KQIpN2o@^&b6CLP|<~r"
        "0p9qGOvYOQ0P=u}_nOy|1LD_!bJ?=%=}s9{DJX_PU>8fUzDFb9KT67x8WFJc{o#g<xTg_ZWyDr>B@&U(AIC?N??h"
        "KWu-6S(YN+DmtdQj+pir%9Tp%M_+!YNu}ccS^3nVMiTv!bzvx*coS?bKaqhWIXF-I*T*7w%5mNl#`t2{aoioUglp"
        "p%-GD&>REq&KmVG;LN3h0Ej|`!H~J>NdH910Qt(0-d9f@Wi{Aonhs&$w%M$KR?)XZtlGXPL-LLOQe}i?tUarAoPd"
        ")R(ORxOI8*jby-fw*Cj~<nz3`$<=GAnON*r<))Y&OlN-Jpt8yb7ycrK_TPs^Gys{CkKV*N;%MdQ|_ZeZ8sMI(Qmv"
        "{kGn|ZQCu{ksaUZ-F#Q=;Cb+T_dI`jdVxLN+r8T__7|_a*OyoGmc9SHPd|E}#V0hlVNJJD&7^6X?Ca+1=L-(_zz&"
        "mxKQssZ{rbK7dH?CQsvWfBwrSgz{8qn@zvJWN_<TGb{|C1a?)v",
    ),
    "IQ2_S": Grid(
        8,
        (8, 25, 43),
        "c-jTQL2sf=0|4L|GD8MWGh{HZr@>%j{S`B0AlTDju(3U1qnqyj3NX-EPuO7NekW_(H(h___dEbt00ROBfB_DMAOH"
        "f4z!*$`0ve=X1`L>k1z3U=Sc9M77pTA%v|tAgpa*C07u*1Z2-?tr6uQuZJ`7<5C5&MLGnm5yKEfwh!VP?dHEdu9K"
        "j0C5!7BuoWnqh0%;J`?rk1j_m0B~)SPQGNT5E6h*2RJdAsab}A{TkcM<I&P9lA#n#VA1;dO$fU&?9<6C3-;{RHFv"
        "Hp?B1wBRZikbVUGL7-ND5m|>2GIKTpr@dPWZaf)Zy;5lC4C0^k*uJ9JOc!v+T$7c*}WZSl5Q`@tpo!FV3+l5`)wc"
        "XgA4TwcBA%qc5h9n?@jLDQJqDe|-#E>~zkR@4>HK|BTdU7MsK@N3X$8&rqbfl9wnUgz(Q#!TNIbgsBd@veJ2GfBV"
        "{24%ss7)P8sY^ZT(~w5=j!GKSgl06S1%0GXw4^U|Ltkl48~R2&dZZ`%MXwYvi(y9CfHB6|kOfSz5gW4!Q%tjz&6r"
        "_xwqQ%PVry2hEo<419aztxi(JR0uIGks<VrVjbGLA7w{bfcaEoJ3IOCiTdB6o9^9fg6^OVoH;d8#=OTOZ3Uhyq&`"
        "HmlW&(9os$g@4iqn_(|p6`WT<Vi2~5-;;|ukcE*_8PDAzz`3~kPZ1z4AoE%&9EBYhR{d8?K?j8J>U03U;441_?e&"
        "kg<tx$-}oS~0vwQl1w0Ue3UpwCU%@3nKj;tn<M9U&mcW7tCb$@iKnO7wQ=x<wM$E-RtVJdEq8B#-Lln}`4ZSc7Wf"
        "+G^n1@AJhIQD4T?j^l(P%UoO-FiUM!V5|^gV(RitNaVXyiqH6h=`bqc}>UEXt!IDx*4TqAmhsJSJl{=3_BdV?8$G"
        "pW|u_@6a8+lXp*dV1g%X!Y68?CuXvr+$QiI-P8Ny{a`wpuBW@{ehMX$wsa(wuJoiYf5=cq@=i(_%S2}KLFTfMkMc"
        ">D@<ncBEgRX%qddtkd6hs}3M-<R;%cY@CDcfbl~P)zYNm{utA$#sm0GJxZB?sw>Y#dcRxm~}josLb{WywcoWxn2$"
        "3<Mmb=<^2TN-Pk2byWFhdR(gkMvkiw9;CqdZvw@>xEwGm0s&gZ*{A8`k;G#)-XYdoj3_i+{8=#But`2CUKG^S&}D"
        "3QYOEXI%$$F0jZVZl%y=>sYq3-Q<GNd-xOvjb26H_nV0!lm_?b);w;IsEYFIp%$lsrz|5NA8JV#epNW~8>6w{Tv("
        "FiPKo9gmJ^*7GY=~ioo1qDeFe5WI6QhhashJsL=4N4*W@Xl<GF#J{ojI7^z#Qdv?&LIgb1(PvFpqMX$9a-xd7c+}"
        "nb&!fcR85jIhnILpNqMg>$#c#npbmJpu#Skf);M!6@C#GQ6Y=CNQ$h;i=rrtx@d~701In@7i7T}d?6NUp%-RRE#M"
        "=1q>p!x@)0bpC0>#xTk@q?s-<3<<@2&y!YA}ZpX3vG4xZcR?`K$|(k^M~mR{+XVHuUOOv<dx%c3mHrtC_vvQ~ISR"
        "&2#rVx?AkWmeVd&kDWJ7y0t|^7R7Ncum%9&DUbB)_QH$)f#TlhHm8MVe`8A*npq?Pxy*n>Feh8^a_4Wf5pGQeuK)"
        "Ya78Ls@hYf9HLg^pD^ty@MYXI}RaLdsq3SDGquQxy?bcrH*I^yivX1Md&g#4_>bh>~uKrhpE#3~cY|FQ5tG8wg8`"
        "Rj1)6m9kyvA?BMmBMiG+C23MN>9)(==TJTC2q^X<5r#(W+Lrrmfn23*XQieY<~?Z(xUaY{z$Mr*~#|*}-@8F5frr"
        "qy2LKyx;CGd)T4Q>1gM6UgvjFC%d>yx~$8)qAR<)Yr3uj2Yg@$eozN}Fo)*@{6HV{Lw@}C0eY*)J?UA`d(o?2_ol"
        "D<&mJDpksjsobo@Gk&-8Qs2~X%mPj@GI`ga0<W`E{?y8nSQJ`c|PJUUO$>a5S^d^z9F@@w;DT?UuYWpbHbwwK*yf"
        "BC+^E4tFFyuM$rSMWFZoBucXo_t@vi+^wb$Zc>Fx6y5K+ud%r{{y~e?!N",
    ),
    "IQ3_XXS": Grid(
        4,
        (4, 12, 20, 28, 36, 44, 52, 62),
        "c-jGg0e}7gAOHlA01NN{5Fh~=AObtk13@qZNT38!Pz6|^1!2GjcmN23KnRHd36hWroA3##@Cv;U499>B%1{mXun-"
        "?X5-+h6JrNW~p%rS;8MJ{M%;6m45g!3EAPAx$5i%hdq9Gh|A}9hRLXsp<A|-(`D2Spck%B3@0xZG;E!ko&_7X4!g"
        "ECM<HD;4Hg(E%S13&_lKnnyx5@bOcBtk(nL`8%|N)$y{G)H%YM}Q<qiS$U2BuSqHO05)3$iz(e#7`ZyQbToBVZ~R"
        "$HC)bBUIB(+3Kn4#hGI3QV?ZWkP?lw6W@dplXoyy6s-|nnwrv=9aykceMkjS`$9SGMd)o(p1o(g*_<<|<f_w;xp9"
        "qSuXp6^Kjs%&KG+C8niI>HRoXUxv3L2s~3ZzDArESWnnyRb9x~>R2u@|eeLYuXyOTFSt!6a<LG#tfo{K&M7&E8DX"
        "MXlDGJ>1bf;01o*2(IBOZslOE=%udez~1cJ4(|~k@<1>2RFC=CTA4T",
    ),
    "IQ3_S": Grid(
        4,
        (1, 3, 5, 7, 9, 11, 13, 15),
        "c-jE~1ONO05C8&D00)2o37`NB-~bR10Tr+TARq!IZ~`f?0x%#0Ilu!y00coG1Vn%YNzepPFa=kT1zkV}aZm?(00@"
        "Cl2#0_Oi{J>6Pzjj838GL6r;rM(fD5}Y49U<8&>#)junpco4(Ol`_mB_$01ylD5D`HU8UYd`krFr|6hr|PQehQa5"
        "f)`}7Iv{0hLISHkr}Fy8^9qP!~q@BVIA9n9_#@i0U{s-f*=X9APw>$5F#NN!XX~QA}$gmIszm?G9*TVBuo+|Sh6K"
        "yf+lK$Cw>Abiqa^L0x6WDDWEbctpY2$5-h}WEXcAf(Q+-=!Y$z<FZePr1*0$wlQA13GA4sEEE6<HvoukIHCmH4kV"
        "83_Lpr7tJi~)L$`d`^6F%~TKL8X!15`i<gg^?!Kn@f^6Ldisq(LDxLM4PkDs)3Qv_m}vL_&l_OY}riR7F|DMPigj"
        "fka4$6iJhWNuLx-tMp2_#7n>=OvRK;(nL+!v`ylKPWBW~2L(|RrBNLfQaaUBM3q!h^;KZCR(J(if^}Gt)mpJtT*+"
        "l!*fn10C144*U=8+Q5|&{b)?p$>VkeejGnQjPHe^M{WKlL{U<PM;=4XJWXpp99oQ7(_hHT6hZPRvb*cNW%c5dyqZ"
        "v&Tb4kvLLr*beyb3uo6N>_DSM|N(vca9f&!8d%+Cw<)qfCQ+35J-U+sDUAff;cFIN0@|5D1}(qg=3h8Z5W7yh=`3"
        "CiJJ(DuPBSSNQ}w2jL;~J+1QN$DUcNTksz6qMR}A_DVK}MnXrkR&551knVtfQpbRRZAWEVqs-iZ^qd_{PMXIDxs-"
        "=1gsEInMnChvkDy+wftk+7e=~}P*8n6Tlu^MZ#N^7-gySAb$yu>TL3B14!oWUCm!$1thS4_u>%*mqM%Cd~hz|73i"
        "49*oj(lQOyL(SE2UD%+V+{+E%1b*NUF5w;y;w&!XLZ0MQKIUZ}=!A~wjvnclp6bG`?cKia0blS75Ai53^<pphnGg"
        "Jy=rZg",
    ),
    "IQ1_S": Grid(
        8,
        (-1, 0, 1),
        "c-jq@LCUgF002ue%2kF+wz9~mPLUrf*~%xrhq}s8$xcy`VXiWKlC3N<s#E^|31%}eOsz)L$XcsL)#w^q6KccSq&B"
        "N5HBd8asOHypwL>kgB{f_tYtP!J_Nz7OWSy=vb*|3W`*pD{)z!LIH|ntN)ZMyQ59*tGR8Q+!J+D{w8bJ^(f+AQ#A"
        "cn+*m=OvA2%GSTkk}CiA|?_dB`{GCCGjLa#E+mGOoMBP4XL3uV8dy64Zo2#ibnMx+#pG^NwQ>*?2}V+PAcS*)JZ^"
        "^BqR}OlPhvf`s9Y(l6x{GF?l2J<b!;X75OH=B-7-ZQd4f~O`{2$R&&*Kn?W;dM$NRDHH&7gMYLKis>Qa1*042c&0"
        "0zev{1`$?OKOc+)7%wRkoh3PwUqr+jN_0^X*YvY)fsu4cf5nw!L=PPTN^KZx`*VU84x9MNt$>3Dl69P%}!Q0A*7y"
        "<x@NAKt)tcB^0Jg>Pda5AJys59j3!~Mjf#ub>xoTfgP*kcD#<?2|H;g>*SqBr|Q({2Hm9FbcgQJEZw6A^oX9)3ca"
        "Lt8qfx9(vU{9O|NL5KGIhj(+~PZ(_N;^b;a(yt9G@n(S=>B>vX+t(2crjH|yrzs#|B8Oq*dCmgzA(GhoJy#3+o)E"
        "SMz&7?XhvVr*v3_{@emGH2$(WDI6*Ou^il2lHYo=F1Q)$x<xMGAzq-EYAw;kQLbpJ7XnQW))Ut0c)@(3t7b4ti!s"
        "j$NFr*hU|_#utzpxV>V$gY|3UVW^=Y+?`+9F*@~@m4UXiR9LsTBkLz;-Zp_WOKThTpZow@%z(Edi7H4xV=W#x_;X"
        "-c9ow$U%a+rH@Uykl^J+UYC<eu8odU_A`te(?b_1vD<3wmKM>ZQG`SM@r4muLAtKj20FkC%CcU+{o8dB`K)<{f^;"
        "`}~$a^C^GjF@NJ9{G0#s?LOBZ^~Zg=ulBXR-Z%QNZ}r`N&=31jKkeuJd%q?SLQ9|oRuF`tAPN&<CMW_BY{3<LVJ9"
        "4fSV#mcl)_V}gpcqO$N@cI2K+!A{0-!RHh=?b;0)Y>H}D6+AR1f-`Jfn7gZi*Fq=xj69SXzYa59_?l_40Sp*{46`"
        "(ZpxhUpLw%i(kQ8UBXkh#7Gsek6|Mkup+8+Q=Beku`Eg!6+J~qij@+9;52N-mEwfr{Y{x#Dxe%Q-q=|u0>zmh-dL"
        "4W+E1E;$3`*FYzsYMRMF3cgOr#97|(u49BanI}XRk@o9V+-^aBHF=<Vx2|E!c!^vban<x`7F(>|HH#tn=Nir!X&&"
        "g-<o3y9&l$r8VajH(WsWF99cj`@pX*i9hmuWsNrmtx=t<8v8Yevn4*>E<Q&1T9B%+So9`Lo^ZFpFo&4A08hbM~42"
        "X5^fnb8~U7&5b#nTXSdb&b@gs&*sJaF@Mi%QeA3DO{pz)C0633p468H(pZ{GinNfH5|B&@N=ULLNAjhOw3YVKQ94"
        "N%=_+BVlpfMkBLC<==8yXm|D-?T5B@oS-e354{>%QVzq-uIygZc^c_A-lAe%Cjk?hKA*_Su+R^H1e`7B@LtBmDRe"
        "#l?Bt`G{TPztRu3afAmuLz2$%oItH6-7}MP0<ygm<m*oVkx%bDxTsiff6bQ<)}nTtfWe&U?o=y<*ro9NBJprl~mg"
        "*qq1sG?W+TIq)yej`ll-DLe*8E8Y)zgYO8D2S2yZjjnqWVRIEPKm-<%81-)Pw{e`&rTWAY?0T<T7U3iON5iX)dy2"
        "uv!qF7Xmx<+bEjnX<Aqp?~~8)zeKtj#q=TWUZvG*g2b(rj&|tu<c@w5@j1&e~POTCUx+hxXFm+E?S2@={%DOSrU_"
        "&eB_k%WPRK>v}^c^`_p|yE?1)^?^Rpr}|u1^o0&|Q-?azZQa*5`bj_QSik9|{?On0_kSo_pbaQM0|u~w13kb40f="
        "A>CSV36AOi)cKm$4ezyKzI009fwzyU7sfDZx?f&+*^3NnB}4hm3$3j9FbXc}FEHTuTD7#V+tVk`|{m<BYEVH<11H"
        "zMO=Tn%g##@%=s4U;r!lQCJ7GkYd)4ouOUm@`u{Wm7R#Q!|&QZUWOZp@~e(v`xo!&9&*7z8RRIxie!kF;g=$v6-8"
        "N`7mE*W&X@MBwz!QunF6+18LZW3}hh(dDw>oID#S^!zr9Y3I0JDDo}+Bs6ib9Xh0J}h@b^+=)e_pp$B~!zzq!H7V"
        "hB@M(_+1c!4R*Aci@-!2&+u3s&$Azp#eth(Hb0L@m@tG-42odWc5?8lWK>ArXzy1Wl2I6r`dB($Es=2p|KQ2qJ_m"
        "WFrT;$U{B~(E&y1gkp3?2}%)0cl1ORdZQ2eqJ~9UO{;BnEY|8-18Zg}*1}p^z%ngpA<MFCYh|r1&+@H<b+#_n)xy"
        "@zdRSkpZWA_XQ#NfgHfwV>Z;Q5M%eG>xwr1-#unpU^p^a?Iwr$6DZO``Yzz*%b9oc6)wKE&rxqY(>yRsWj%VC|qB"
        "RHZncBYQvEF8@N4s?)XIkvNQd}rfqoxPJdR|h+}b93&_!y#A9id*q3aV4+x6<nc}wQ^SO%3B4iaJ66Mt7=tu8*bB"
        "WyIq%c2ky`vyHi(jH5a(hMXv4oZs2a+qno%_7rPJl?S5T)&8_+Md@ZfjHC&^$wO*~Gb-K>i)tdIY9_w*l-y3*iZ|"
        "cpxKTq)%-qHh}=|K;9w&!>&Z|(Ws(TlvZck!-X=3y`QZr<H{crWkkk$%gkeA;Jy&gXsESA5mieBB4W=|dm+w(t6$"
        "@B4ut`X~SFCw}T<Klcm&?mzv?fBPSw2-*P~2*Eg*1k+$1D8V9F1|Tp47@)ukoM09B!6w)Rhad`)APe%~78F4lyn="
        "V|3%Cux5jWDt*uagmaW~;6+N7J?=Dn$hjj$84;UFA^<8T_zLn%~3HC%)sG(#Ao&<<CjA8x}#cnp&ehmY_TR^d0Kx"
        "7@b3mA3L$+v;1mwYJXI+xpvZd)j8(+xEVFZ)-bZ*V<7#VK>}OcC($b(|2HJ?$FNO`Mcfju#0!e4)4m{bNAW(cI2M"
        "kGkb2&@5Q~em-pIU-y3_lM|*2;@4bDn5BJgjywCRezSvj$+JQK<4%C4?2#4Wea+n>!!93Up|FAn84)Gy5;6r(M9z"
        "KWPfjRO==_nt;5gwhRd-RUsF*_E=den}(5gYZRaWswQkrXM>A_9>a!3afm<V1cHM4M<E?W1FKiq6p`x<)v<Mem3{"
        "aVP#Ho}`m}(oV~heu5|a<ec17aN3@tQ+m3eUZ+}2#I2Z$*;t5&@g$zbQmn)vHe);X<1pUEhd7Rt7{_J&j6d-&CeO"
        "_?eP+(wSv*T;`K+F`vwk+t@a&x3vv-cp`MEe(=UPG}t%OS0L`a6oB$*{j0unPp$u2o0agroBDU)aNNqz}=p)cH}c"
        "i}JMMY^aL?E){>#kqu+?IpUTm+X>Xic58=r;W6kw$o0^roFVE4$@INPN(TSRZ=|#shPqQrFObb{q&fg(rb#-Tlz>"
        "}={x<V<dwcMSN<wq<*RztuKLxu!mD)+uHiMhX4m}sz1Fiv*33E?oAt7BHqVwB$jl68D6=v<TV-yx&iw3{ow93|Wj"
        "MQKkL;V(Fo|23!W~Rw2D6yMJRV>XPw@;(SjGxgv4(XFuz^hsF~SzMv4dUgVIK!L#Csg!7^nD(GmLSL3w*~Ve&Py$"
        "@DJDXM&8NUoX>@PoKJHlU*uX2awCU1%I)0GH~Aqy=I1=guX&c^{FT4+Z%*F08-EjT(oMbTH{%9x=;qwKn}3UL=`F"
        "t%x9Zj?nnk<l6y1U?dPTnwia{|d#>Kq&E0khUEDKPW1uRfu7wf_=f?`|ji(_#qt_3dc#iMu^<ej~XcloZ~wYz?Yc"
        "kAxnqkDSK?)aYHYb8;(N~&Z_p&XWza#kuOD9sX;cDXALWn3mDF3a*+e#&1-KH3lZ!92JJ|L8x|hxPyu_^=+%!+m&"
        "<=y7>mANiwr5YN_=dUl@tbNHM*XHVq`p6F>m{pap^c*f7<iJ#^3`TRV8PyQvoq?i2CU*-$Gte5k0U;Zn2ZC>FkdN"
        "r$d)v3A_TlK1OHLd<Cr2>^%!3tG&<yYHkUmdHcI#uWDTH)&Ue?I9q_wK(3Z}Ba^)%Wskyx|+Yt@rA^exKf#H-6{u"
        ";{ABP-tTwqLws5v>LYxHpUG$T0Uz^&KK5t#Ieg+z^1+|-^Za~1zYqCkzWjIa6~EF~|H7~Hb-%$k{9eBKxAr4`tsn"
        "Ihe#777H~WE~`9r_m@9>L%$q)a^-}CqR{eJ%dt$R)J",
    ),
}
