"""Common English words of 3, 4, and 5 letters for word games, in a fixed random order: a game with fewer words takes the first.

They were written down for this project from everyday vocabulary, after no published list.
"""

WORDS: dict[int, tuple[str, ...]] = {
    3: tuple(
        """
        put fly mud job gym zoo bug cut toy owl ram few gum any bag jaw car fog pea oil tax joy wet yes bet kid bay
        fan pot old mad gem lie one cup hit lip bud cat our tan oar gas wit rat sum add box jam pin fed kit boy web
        hay ink tin cap saw ran end pen hot rob peg leg tar tub rip fox pub pet beg eye tea eat win nut yak wax new
        use cab lap sob hug bat rub act dot and cow get dig hen ear hub law far mat log ill top ant sky fin raw pig
        dip age bit fig try map egg bad pan rod shy gap arm bed dim row hop mug jar fit can jet due hip son key ten
        mix lab lot pit net sow oak van fix pie sad art bus let den odd rug tip nod tap set toe hat ape ice ash zip
        dry way war low rag tie sun two dog tag man wig rid red vet fat fun rim gun paw air six bee run spy pay sit
        lid day rib sea fur
        """.split()
    ),
    4: tuple(
        """
        gate grip away lamp face grab hero deal fish item heat farm food huge fair lawn boat hole copy foot beat film
        coat lake herb cake coal last loan belt loud hour lock deer goal bush call grid cast drop care crop glue lane
        fact firm desk land bear bowl knot debt glad king cook come goat long find file free able home fast grow code
        busy list flow fuel book girl bank game bird luck head hill aged flag camp barn form lion army dark card horn
        kick lens burn hall hold lead bulk feet ball bath line gain host fund leaf dust jury cost idea load gray left
        grew edge harm cool band boot jazz best city fear lung exit dock hope calm easy hand iron blue base kite earn
        data cave gift full drum frog fork kind half keep keen acid duty lift jump draw gold inch club deep hair flat
        fall join body fire life east chin cold door dirt knee back corn dish both clay down fill help hard crew bell
        duck high fold baby bend bone cash good foam loft born each dawn
        """.split()
    ),
    5: tuple(
        """
        usual blend choir elder price smart wound apply glass flock token story light still clean begin alarm pinch
        table share grade apple sleep metal awake actor grape point crane swift craft touch shape magic blast globe
        novel error scene debut never solid think enter party large skirt merit chart float baker board vivid flesh
        kayak basic pulse check shine forth shake steel trust input truck giant third spice visit shore olive catch
        after attic music opera while brain labor world court chest amber bench early cloud horse throw local avoid
        topic truth shark focus rural grant alike lower scarf sheep below chess creek watch heart dairy loose claim
        motor prize slate sweet tiger carry again worth chase booth young ridge alter right outer block fleet nerve
        royal legal badge flour brief climb trade grass dozen rifle route clerk liver write trial pause given cloth
        daily spend sport raise polar shade class slice inner scout thick asset joint linen month clear flood pearl
        exact guard wider spare onion realm plane stove ready stack earth crack store today water taste unity award
        lodge flute range teach laugh flash bound sight cream uncle trail start pedal agree proud blind civil skill
        elect arrow adult value radio waist state bride march panel robot bloom color brick index zebra mercy humor
        model chain tower stage youth salad coast proof child chief cause spoon quite grain tooth orbit photo mayor
        dress group round brown logic human laser trick graph frame camel storm drama atlas river being quick close
        money cedar diary bring pride habit fiber roast sword robin fable peace press smile staff beast train lemon
        later blank noise wagon serve least about fifth seize whole audio flame noble guide front sound owner chair
        sugar lunch speed blade boost arena brush worry toast among maple civic shell grand pitch broad stick alert
        crime leave draft react jelly paper cabin frost shirt cycle heavy small charm build knife twist jewel shock
        piano grave cable extra union scope north order exist title nurse ideal dance guest queen elbow wheel plaza
        haste villa lucky quilt ocean slide reach vital honey curve paint wheat under short allow treat major piece
        faith aside favor image learn ivory crisp hotel basin three entry white upper candy knock final blame slope
        thank happy tribe cross hedge space prime theme honor rapid judge speak trace green brake delay scale armor
        shift field grace bunch birth fresh movie track limit print trend snake enjoy witch sense night argue brave
        ghost offer grief spray stamp marsh punch clock alive forge label medal bacon apart pound broom hobby drift
        phone trunk break mouse aware spark tight dream eager phase drill beard layer place crowd smoke bread feast
        meter stair equal cheek beach where alone depth shout fever rough rider thing maker black stand rebel couch
        juice south faint issue event guess score coach quote blaze chalk mount cargo plant ankle great admit sharp
        urban fight ferry video rival lease agent force shelf fancy quiet sunny ahead woman thorn cover yacht canal
        plain harsh total carve drive pilot hello minor plate moral bonus patch adapt melon other boast kneel decay
        valid seven power angle match raven floor whale found fluid mouth loyal enemy empty glory fruit adopt above
        crash count solve crown brand eagle reply fence level scent glove album wrist cheap ranch house stone pupil
        clash drink berry hurry steam arise voice porch irony
        """.split()
    ),
}
